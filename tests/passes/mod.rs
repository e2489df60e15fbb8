//! What the tests of passes with real processes share: the test program in several roles, a harness
//! that runs its tests in its own process and thread, and a small closure to run.
//!
//! A process that a test starts is the test program again, in a role that its environment names. It
//! tells the test of its progress in lines, and is told to go on in lines; it dies with the test.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::zombie_processes, reason = "they are awaited by their number, with their status")]

use std::io::{BufRead, BufReader, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use meshwork::actors::host::pass::Completion;
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::protocol::pass::layout::Geometry;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const ROLE: &str = "MESHWORK_TEST_ROLE";

/// How long anything may take that is awaited. Only a test that fails waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A name and what is done under it.
pub(crate) type Named<F> = (&'static str, F);

/// What a process of a test does, with its arguments.
type Role = fn(&[&str]);

/// The main function of a test program: plays the role that the environment names, or runs the tests
/// whose names hold one of the arguments, and prints what the standard harness would.
pub(crate) fn main(tests: &[Named<fn()>], roles: &[Named<Role>]) -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        set_pdeathsig(Signal::SIGKILL).expect("the kernel ends a process with its parent");
        let mut words = role.split('\n');
        let name = words.next().unwrap_or_default();
        let (_, play) = roles.iter().find(|(role, _)| *role == name).expect("a known role");
        play(&words.collect::<Vec<_>>());
        return ExitCode::SUCCESS;
    }
    let mut arguments = std::env::args().skip(1).peekable();
    let (mut wanted, mut is_exact) = (Vec::new(), false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => {
                tests.iter().for_each(|(name, _)| println!("{name}: test"));
                return ExitCode::SUCCESS;
            }
            "--exact" => is_exact = true,
            "--test-threads" | "--format" | "--color" => drop(arguments.next()),
            // Another of the standard harness's, which changes nothing here.
            option if option.starts_with('-') => {}
            name => wanted.push(name.to_owned()),
        }
    }
    let is_wanted = |name: &str| {
        let fits = |word: &String| if is_exact { name == word } else { name.contains(word) };
        wanted.is_empty() || wanted.iter().any(fits)
    };
    let chosen: Vec<_> = tests.iter().filter(|(name, _)| is_wanted(name)).collect();
    println!("\nrunning {} tests", chosen.len());
    let mut failed = Vec::new();
    for (name, test) in &chosen {
        let begun = Instant::now();
        let is_ok = catch_unwind(test).is_ok();
        let result = if is_ok { "ok" } else { "FAILED" };
        println!("test {name} ... {result} ({:.1} s)", begun.elapsed().as_secs_f64());
        if !is_ok {
            failed.push(*name);
        }
    }
    let result = if failed.is_empty() { "ok" } else { "FAILED" };
    let (failed, filtered) = (failed.len(), tests.len() - chosen.len());
    let passed = chosen.len() - failed;
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; {filtered} filtered out\n"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The test program in a role.
pub(crate) fn command(role: &str, words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a program knows itself"));
    command.env(ROLE, [&[role], words].concat().join("\n"));
    command
}

/// Another process of the test. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    stdin: ChildStdin,
    lines: Receiver<String>,
    is_over: bool,
}

impl Process {
    /// Starts the test program in a role.
    pub(crate) fn start(role: &str, words: &[&str]) -> Self {
        let mut command = command(role, words);
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut started = started.expect("the test program starts");
        let stdin = started.stdin.take().expect("it is piped");
        let stdout = BufReader::new(started.stdout.take().expect("it is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { pid: Pid::from_raw(started.id() as i32), stdin, lines, is_over: false }
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// The next line that it tells; `None` when it has closed its output.
    pub(crate) fn next_line(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("{} has told nothing", self.pid),
        }
    }

    /// Awaits that it tells exactly this.
    #[track_caller]
    pub(crate) fn expect(&self, line: &str) {
        assert_eq!(self.next_line().as_deref(), Some(line));
    }

    /// The lines that it has told and that nobody has read.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.lines.try_iter()
    }

    /// Tells it a line. One that has ended does not hear it.
    pub(crate) fn tell(&mut self, line: &str) {
        let _ = writeln!(self.stdin, "{line}");
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        if !self.is_over {
            kill(self.pid, signal).expect("it was started here and not awaited yet");
        }
    }

    /// Kills it, and awaits its end.
    pub(crate) fn kill(&mut self) -> WaitStatus {
        self.signal(Signal::SIGKILL);
        self.wait()
    }

    /// Whether it has ended by itself, and how.
    pub(crate) fn has_ended(&mut self) -> Option<WaitStatus> {
        let status = waitpid(self.pid, Some(WaitPidFlag::WNOHANG)).ok();
        let ended = status.filter(|status| *status != WaitStatus::StillAlive);
        self.is_over |= ended.is_some();
        ended
    }

    /// Awaits its end.
    pub(crate) fn wait(&mut self) -> WaitStatus {
        self.is_over = true;
        waitpid(self.pid, None).expect("it was started here and not awaited yet")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.is_over {
            self.kill();
        }
    }
}

/// In a role: tells the test a line.
pub(crate) fn tell(line: &str) {
    // Without the lock of the standard output, which another thread may hold while this one forks.
    // Whoever read it may be gone; this process goes with it.
    let _ = nix::unistd::write(std::io::stdout(), format!("{line}\n").as_bytes());
}

/// In a role: awaits a line of the test; `None` when there will be none.
pub(crate) fn told() -> Option<String> {
    let mut line = String::new();
    let bytes = std::io::stdin().read_line(&mut line).ok()?;
    (bytes > 0).then(|| line.trim_end().to_owned())
}

/// Awaits that something holds, looking again and again.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The passes of a directory, made for few.
pub(crate) fn open(directory: &Path) -> Arc<PassHost> {
    open_for(directory, 4)
}

/// The passes of a directory, made for so many clients with 64 slots each.
pub(crate) fn open_for(directory: &Path, clients: u32) -> Arc<PassHost> {
    let geometry = Geometry { clients, slots_per_client: 64, ..Geometry::default() };
    PassHost::open(directory, Some(geometry)).expect("a directory of our own")
}

/// Joins as a client.
pub(crate) fn join(host: &Arc<PassHost>, name: &str) -> PassClient {
    let options = ClientOptions { name: name.into(), ..ClientOptions::default() };
    PassClient::join(host, options).expect("there is a row")
}

/// The next so many completions of a client, in the order in which they came.
#[track_caller]
pub(crate) fn collect(client: &PassClient, count: usize) -> Vec<Completion<'static>> {
    let begun = Instant::now();
    let mut ends = Vec::new();
    while ends.len() < count {
        if client.poll(|end| ends.push(end.into_owned())) == 0 {
            assert!(begun.elapsed() < PATIENCE, "{} of {count} have come: {ends:?}", ends.len());
            std::thread::yield_now();
        }
    }
    assert_eq!(ends.len(), count, "{ends:?}");
    ends
}
