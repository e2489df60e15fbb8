//! What the machine does at best, in the same run: the figures are read beside these.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Instant;

use anyhow::Result;
use rustix::thread::futex::{self, Flags};
use rustix::time::{ClockId, clock_gettime};

use super::IDLE;
use super::scenario::median;

/// Few: two threads that share a processor take a time slice for each.
const LINE_ROUND_TRIPS: u64 = 20_000;
/// Of those; the median counts.
const LINE_ROUNDS: usize = 21;
const WAKES_OF_NOBODY: u32 = 200_000;
const WAKES: usize = 200;
const CLOCK_READINGS: u32 = 1_000_000;

/// In nanoseconds.
#[derive(Clone, Copy)]
pub(super) struct Floors {
    /// A cache line to another thread and one back.
    pub(super) line_rtt: f64,
    /// The system call that wakes nobody.
    pub(super) wake_nobody: f64,
    /// From the call until the woken thread runs, which had slept for 5 ms.
    pub(super) wake_to_run_idle: f64,
    /// The same without the 5 ms.
    pub(super) wake_to_run_hot: f64,
    /// The clock that a watchdog reads before a scan.
    pub(super) clock: f64,
}

impl Floors {
    /// Measures all of them, which takes some seconds.
    pub(super) fn measure() -> Result<Self> {
        Ok(Self {
            line_rtt: median(&(0..LINE_ROUNDS).map(|_| line_rtt_ns()).collect::<Result<Vec<_>>>()?),
            wake_nobody: wake_nobody_ns()?,
            wake_to_run_idle: wake_to_run_ns(true)?,
            wake_to_run_hot: wake_to_run_ns(false)?,
            clock: clock_ns(),
        })
    }
}

/// A word on a cache line of its own, and its neighbour's, which is fetched with it.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

fn line_rtt_ns() -> Result<f64> {
    let lines = Arc::new((Line::default(), Line::default()));
    let other = Arc::clone(&lines);
    let echo = std::thread::Builder::new().spawn(move || {
        for turn in 1..=LINE_ROUND_TRIPS {
            while other.0.0.load(Acquire) != turn {
                spin_loop();
            }
            other.1.0.store(turn, Release);
        }
    })?;
    let begin = Instant::now();
    for turn in 1..=LINE_ROUND_TRIPS {
        lines.0.0.store(turn, Release);
        while lines.1.0.load(Acquire) != turn {
            spin_loop();
        }
    }
    let ns = begin.elapsed().as_nanos() as f64 / LINE_ROUND_TRIPS as f64;
    // It has nothing to panic on.
    let _ = echo.join();
    Ok(ns)
}

fn wake_nobody_ns() -> Result<f64> {
    let word = AtomicU32::new(0);
    let begin = Instant::now();
    for _ in 0..WAKES_OF_NOBODY {
        futex::wake(&word, Flags::empty(), 1)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(WAKES_OF_NOBODY))
}

/// A thread that sleeps on `word` and says when it ran.
struct Sleeper {
    word: AtomicU32,
    ran_ns: AtomicU64,
    stop: AtomicBool,
}

fn wake_to_run_ns(idle: bool) -> Result<f64> {
    let begin = Instant::now();
    let since = move || begin.elapsed().as_nanos() as u64;
    let sleeper = Arc::new(Sleeper {
        word: AtomicU32::new(0),
        ran_ns: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    });
    let other = Arc::clone(&sleeper);
    let thread = std::thread::Builder::new().spawn(move || {
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
    })?;
    let mut took = Vec::with_capacity(WAKES);
    for _ in 0..WAKES {
        if idle {
            std::thread::sleep(IDLE);
        } else {
            // Long enough to fall asleep, on a processor that is still warm.
            let from = Instant::now();
            while from.elapsed().as_micros() < 100 {
                spin_loop();
            }
        }
        sleeper.ran_ns.store(0, Relaxed);
        let called = since();
        sleeper.word.fetch_add(1, Release);
        futex::wake(&sleeper.word, Flags::empty(), 1)?;
        while sleeper.ran_ns.load(Acquire) == 0 {
            spin_loop();
        }
        took.push((sleeper.ran_ns.load(Acquire) - called) as f64);
    }
    sleeper.stop.store(true, Release);
    sleeper.word.fetch_add(1, Release);
    futex::wake(&sleeper.word, Flags::empty(), 1)?;
    // It has nothing to panic on.
    let _ = thread.join();
    Ok(median(&took))
}

fn clock_ns() -> f64 {
    let begin = Instant::now();
    for _ in 0..CLOCK_READINGS {
        black_box(clock_gettime(ClockId::MonotonicCoarse));
    }
    begin.elapsed().as_nanos() as f64 / f64::from(CLOCK_READINGS)
}
