//! Round trips back to back, and what is spent on nothing.

use std::time::{Duration, Instant};

use meshwork::passes::Spin;
use tempfile::TempDir;

use crate::common::echo::Echoes;
use crate::common::process::Process;
use crate::common::scenario::pump;
use crate::common::{median, shared_directory};
use crate::worker::Role;

/// Back to back, in batches that the clock is read between.
const BATCHES: usize = 100;
const BATCH: u64 = 1_000;
/// How long an idle worker is watched.
const WATCHED: Duration = Duration::from_secs(5);
/// Passes before that.
const WARM_UP: u64 = 50_000;

/// A client and a worker process. Fields are dropped in this order: the worker before its files.
pub(crate) struct Bench {
    pub(crate) echoes: Echoes,
    worker: Process,
    _directory: TempDir,
}

impl Bench {
    /// A fresh directory, a client of it, and a worker.
    pub(crate) fn open(spin: Spin) -> Self {
        let directory = shared_directory();
        let echoes = Echoes::join(directory.path());
        let worker = Role::Worker(directory.path().to_owned(), spin).start();
        Self { echoes, worker, _directory: directory }
    }

    /// The round trip of one pass after another: the median of batches.
    pub(crate) fn rtt_depth1_ns(&mut self) -> f64 {
        let times = (0..BATCHES).map(|_| {
            let begin = Instant::now();
            for _ in 0..BATCH {
                pump(&mut self.echoes, 1);
            }
            begin.elapsed().as_nanos() as f64 / BATCH as f64
        });
        median(times)
    }
}

/// The share of a core that a worker process takes while there is nothing to do.
pub(crate) fn idle_cpu_percent() -> f64 {
    let mut bench = Bench::open(Spin::Adaptive);
    pump(&mut bench.echoes, WARM_UP);
    // It spins for a while after its last pass.
    std::thread::sleep(Duration::from_millis(200));
    let pid = bench.worker.0.id();
    let (begin, before) = (Instant::now(), cpu_time(pid));
    std::thread::sleep(WATCHED);
    let spent = cpu_time(pid) - before;
    100.0 * spent.as_secs_f64() / begin.elapsed().as_secs_f64()
}

/// The processor time of all threads of a process: in nanoseconds where the kernel counts them, or
/// else in ticks of 10 ms.
fn cpu_time(pid: u32) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    let ns: Option<u64> = threads
        .map(|thread| {
            let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<u64>().ok()
        })
        .sum();
    match ns {
        Some(ns) if ns > 0 => Duration::from_nanos(ns),
        _ => {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
            let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            let fields = after_name.split_whitespace().skip(11).take(2);
            let ticks = fields.map(|ticks| ticks.parse::<u64>().expect("a number")).sum::<u64>();
            Duration::from_millis(10 * ticks)
        }
    }
}
