//! What the machine does at best, in the same run: the figures are read beside these.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Instant;

use rustix::thread::futex::{self, Flags};
use rustix::time::{ClockId, clock_gettime};

use super::{IDLE, median};

/// Few: two threads that share a processor take a time slice for each.
const LINE_ROUND_TRIPS: u64 = 20_000;
const WAKES_OF_NOBODY: u32 = 100_000;
const WAKES: usize = 50;
const CLOCK_READINGS: u32 = 200_000;

/// The floors of one round.
#[derive(Clone, Copy)]
pub(crate) struct Floors {
    /// A cache line to another thread and one back.
    pub(crate) line_rtt_ns: f64,
    /// The system call that wakes nobody.
    pub(crate) wake_nobody_ns: f64,
    /// From the call until the woken thread runs, which had slept for 5 ms.
    pub(crate) wake_to_run_ns: f64,
    /// The clock that a watchdog reads before a scan.
    pub(crate) clock_ns: f64,
}

impl Floors {
    /// Measures all of them.
    pub(crate) fn measure() -> Self {
        Self {
            line_rtt_ns: line_rtt_ns(),
            wake_nobody_ns: wake_nobody_ns(),
            wake_to_run_ns: wake_to_run_ns(),
            clock_ns: clock_ns(),
        }
    }

    /// The median of each.
    pub(crate) fn medians(rounds: &[Self]) -> Self {
        let of = |each: fn(&Self) -> f64| median(rounds.iter().map(each));
        Self {
            line_rtt_ns: of(|floors| floors.line_rtt_ns),
            wake_nobody_ns: of(|floors| floors.wake_nobody_ns),
            wake_to_run_ns: of(|floors| floors.wake_to_run_ns),
            clock_ns: of(|floors| floors.clock_ns),
        }
    }
}

/// A word on a cache line of its own, and its neighbour's, which is fetched with it.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

fn line_rtt_ns() -> f64 {
    let lines = Arc::new((Line::default(), Line::default()));
    let other = Arc::clone(&lines);
    let echo = std::thread::spawn(move || {
        for turn in 1..=LINE_ROUND_TRIPS {
            while other.0.0.load(Acquire) != turn {
                spin_loop();
            }
            other.1.0.store(turn, Release);
        }
    });
    let begin = Instant::now();
    for turn in 1..=LINE_ROUND_TRIPS {
        lines.0.0.store(turn, Release);
        while lines.1.0.load(Acquire) != turn {
            spin_loop();
        }
    }
    let ns = begin.elapsed().as_nanos() as f64 / LINE_ROUND_TRIPS as f64;
    echo.join().expect("an echo does not panic");
    ns
}

fn wake_nobody_ns() -> f64 {
    let word = AtomicU32::new(0);
    let begin = Instant::now();
    for _ in 0..WAKES_OF_NOBODY {
        futex::wake(&word, Flags::empty(), 1).expect("the word is mapped");
    }
    begin.elapsed().as_nanos() as f64 / f64::from(WAKES_OF_NOBODY)
}

/// A thread that sleeps on `word` and says when it ran.
#[derive(Default)]
struct Sleeper {
    word: AtomicU32,
    ran_ns: AtomicU64,
    stop: AtomicBool,
}

impl Sleeper {
    fn wake(&self) {
        self.word.fetch_add(1, Release);
        futex::wake(&self.word, Flags::empty(), 1).expect("the word is mapped");
    }
}

fn wake_to_run_ns() -> f64 {
    let begin = Instant::now();
    let since = move || begin.elapsed().as_nanos() as u64;
    let sleeper = Arc::new(Sleeper::default());
    let other = Arc::clone(&sleeper);
    let thread = std::thread::spawn(move || {
        let mut seen = 0;
        while !other.stop.load(Acquire) {
            // Woken for no reason, or not asleep in time: looked at below.
            let _ = futex::wait(&other.word, Flags::empty(), seen, None);
            let word = other.word.load(Acquire);
            if word != seen {
                seen = word;
                other.ran_ns.store(since(), Release);
            }
        }
    });
    let times: Vec<f64> = (0..WAKES)
        .map(|_| {
            std::thread::sleep(IDLE);
            sleeper.ran_ns.store(0, Relaxed);
            let called = since();
            sleeper.wake();
            while sleeper.ran_ns.load(Acquire) == 0 {
                spin_loop();
            }
            (sleeper.ran_ns.load(Acquire) - called) as f64
        })
        .collect();
    sleeper.stop.store(true, Release);
    sleeper.wake();
    thread.join().expect("a sleeper does not panic");
    median(times)
}

fn clock_ns() -> f64 {
    let begin = Instant::now();
    for _ in 0..CLOCK_READINGS {
        black_box(clock_gettime(ClockId::MonotonicCoarse));
    }
    begin.elapsed().as_nanos() as f64 / f64::from(CLOCK_READINGS)
}
