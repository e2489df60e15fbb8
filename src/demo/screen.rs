//! What a person sees of a run: text, a progress bar, and a line when something happens.
//!
//! The bar is drawn on stderr, and only on a terminal. Text goes to stdout, or to stderr when
//! stdout is for a program.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::cli::no_color;
use crate::cli::protocol::Change;
use crate::demo::report::{counted, grouped};

/// Steals that have a line each within [`STEAL_LINES_EVERY`]; those beyond are told together.
const STEAL_LINES_MAX: u32 = 4;
const STEAL_LINES_EVERY: Duration = Duration::from_millis(400);

/// Where text goes, and how much of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScreenOptions {
    pub(crate) headless: bool,
    /// Stdout is for a program.
    pub(crate) json: bool,
}

/// The screen.
pub(crate) struct Screen {
    options: ScreenOptions,
    colored: bool,
    bar: ProgressBar,
    steals: Steals,
    told: HashMap<String, Change>,
}

/// Steals since the last time that all were told.
struct Steals {
    since: Instant,
    lines: u32,
    untold: u64,
    untold_jobs: u64,
}

impl Default for Steals {
    fn default() -> Self {
        Self { since: Instant::now(), lines: 0, untold: 0, untold_jobs: 0 }
    }
}

#[derive(Clone, Copy)]
enum Color {
    Red,
    Green,
    Yellow,
    Cyan,
}

impl Screen {
    pub(crate) fn new(options: ScreenOptions) -> Self {
        let terminal =
            if options.json { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let dumb = std::env::var_os("TERM").is_none_or(|t| t == "dumb");
        Self {
            options,
            colored: terminal && !no_color() && !dumb,
            bar: ProgressBar::hidden(),
            steals: Steals::default(),
            told: HashMap::new(),
        }
    }

    /// Text that is always shown.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn text(&self, text: &str) -> io::Result<()> {
        self.bar.suspend(|| {
            if self.options.json {
                write_whole(&mut io::stderr().lock(), text)
            } else {
                write_whole(&mut io::stdout().lock(), text)
            }
        })
    }

    /// Something went wrong, or might have. Shown whatever becomes of stdout.
    pub(crate) fn problem(&self, text: &str) {
        let line = format!("{}\n", self.paint(Color::Red, text));
        // There is nobody left to tell that stderr is closed.
        let _ = self.bar.suspend(|| write_whole(&mut io::stderr().lock(), &line));
    }

    /// The result, for a program: a line of its own on stdout.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn result(&self, json: &str) -> io::Result<()> {
        write_whole(&mut io::stdout().lock(), &format!("{json}\n"))
    }

    /// Something happened.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn live(&self, text: &str) -> io::Result<()> {
        if self.options.headless { Ok(()) } else { self.text(&format!("  {text}\n")) }
    }

    fn live_in(&self, color: Color, text: &str) -> io::Result<()> {
        self.live(&self.paint(color, text))
    }

    /// Shows the bar of so many jobs.
    pub(crate) fn start_bar(&mut self, jobs: usize) {
        if self.options.headless || !io::stderr().is_terminal() {
            return;
        }
        let template = if self.colored {
            "  {bar:32.cyan/black} {human_pos}/{human_len} jobs  {rate:.dim}  {msg}"
        } else {
            "  {bar:32} {human_pos}/{human_len} jobs  {rate}  {msg}"
        };
        let style = ProgressStyle::with_template(template).expect("the template is well formed");
        let target = ProgressDrawTarget::stderr();
        self.bar = ProgressBar::with_draw_target(Some(jobs as u64), target);
        let style = style.with_key("rate", |state: &ProgressState, w: &mut dyn fmt::Write| {
            // A bar that cannot be written is no reason to fail.
            let _ = write!(w, "{:.0}/s", state.per_sec());
        });
        self.bar.set_style(style.progress_chars("━━─"));
    }

    /// So many jobs have ended, so many were stolen.
    pub(crate) fn progress(&self, done: usize, stolen: u64) {
        if !self.bar.is_hidden() {
            self.bar.set_position(done as u64);
            self.bar.set_message(format!("{} stolen", grouped(stolen)));
        }
    }

    /// Takes the bar away.
    pub(crate) fn end_bar(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    /// A thief got jobs.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn steal(&mut self, thief: &str, victim: &str, jobs: u32) -> io::Result<()> {
        if self.steals.lines < STEAL_LINES_MAX {
            self.steals.lines += 1;
            return self.live_in(
                Color::Cyan,
                &format!("{thief} steals {} from {victim}", counted(jobs.into(), "job")),
            );
        }
        self.steals.untold += 1;
        self.steals.untold_jobs += u64::from(jobs);
        Ok(())
    }

    /// Says of the steals that had no line, now and then.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn flush_steals(&mut self) -> io::Result<()> {
        if self.steals.since.elapsed() < STEAL_LINES_EVERY {
            return Ok(());
        }
        let Steals { untold, untold_jobs, .. } = std::mem::take(&mut self.steals);
        if untold == 0 {
            return Ok(());
        }
        let (steals, jobs) = (counted(untold, "more steal"), counted(untold_jobs, "job"));
        self.live_in(Color::Cyan, &format!("{steals} brought {jobs}"))
    }

    /// A node saw a change of the membership. It is told when the first node sees it.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub(crate) fn membership(&mut self, by: &str, change: Change, member: &str) -> io::Result<()> {
        let (color, words) = match change {
            Change::Snapshot | Change::Updated => return Ok(()),
            Change::Joined => (Color::Green, "has joined"),
            Change::Suspected => (Color::Yellow, "is suspected"),
            Change::Recovered => (Color::Green, "has refuted"),
            Change::Died => (Color::Red, "is dead"),
            Change::Left => (Color::Yellow, "has left"),
        };
        if by == member || self.told.insert(member.into(), change) == Some(change) {
            return Ok(());
        }
        self.live_in(color, &format!("{member} {words}, says {by}"))
    }

    fn paint(&self, color: Color, text: &str) -> String {
        if !self.colored {
            return text.into();
        }
        let code = match color {
            Color::Red => 31,
            Color::Green => 32,
            Color::Yellow => 33,
            Color::Cyan => 36,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

fn write_whole<W: Write>(writer: &mut W, text: &str) -> io::Result<()> {
    writer.write_all(text.as_bytes())?;
    writer.flush()
}
