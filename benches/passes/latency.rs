//! Throughput, submitting, round trips, and what is spent on nothing.

use std::time::{Duration, Instant};

use meshwork::actors::host::pass::{Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::passes::Spin;
use tempfile::TempDir;

use crate::common::process::Process;
use crate::common::{IDLE, median, shared_directory};
use crate::worker::{ECHO, Role};

const ARG_BYTES: usize = 48;
const IN_FLIGHT: u64 = 512;
const WARM_UP: u64 = 50_000;
/// Passes of one measurement of throughput.
const PASSES: u64 = 2_000_000;
/// Passes of one measurement of submitting.
const SUBMITS: u64 = 500_000;
/// Submissions between two readings of the clock.
const BURST: u64 = 64;
/// Round trips of one measurement after idling.
const IDLE_ROUND_TRIPS: usize = 100;
/// Back to back, in batches that the clock is read between.
const BATCHES: usize = 100;
const BATCH: u64 = 1_000;
/// How long an idle worker is watched.
const WATCHED: Duration = Duration::from_secs(5);

/// A client and a worker process. Fields are dropped in this order: the worker before its files.
pub(crate) struct Bench {
    client: PassClient,
    pass: Pass<'static>,
    asked: u64,
    returned: u64,
    worker: Process,
    _directory: TempDir,
}

impl Bench {
    /// A fresh directory, a client of it, and a worker that has run passes.
    pub(crate) fn open(spin: Spin) -> Self {
        let directory = shared_directory();
        let host = PassHost::open(directory.path(), None).expect("a fresh directory");
        let worker = Role::Worker(directory.path().to_owned(), spin).start();
        let options = ClientOptions { name: "bench".to_owned(), ..ClientOptions::default() };
        let client = PassClient::join(&host, options).expect("there is a free row");
        let pass = Pass::named(ECHO, vec![7; ARG_BYTES]);
        let (asked, returned) = (0, 0);
        let mut bench = Self { client, pass, asked, returned, worker, _directory: directory };
        bench.pump(WARM_UP);
        bench
    }

    /// Submissions that were asked for; one that found no room is the same when it is tried again.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// Passes that came back as they should.
    pub(crate) fn returned(&self) -> u64 {
        self.returned
    }

    /// Passes a second with 512 in flight.
    pub(crate) fn throughput_per_s(&mut self) -> f64 {
        let begin = Instant::now();
        self.pump(PASSES);
        PASSES as f64 / begin.elapsed().as_secs_f64()
    }

    /// Nanoseconds of a submission while the worker drains, in bursts after room for them was made.
    /// Retries count.
    pub(crate) fn submit_ns(&mut self) -> f64 {
        let (mut submitted, mut collected, mut ns) = (0, 0, 0);
        while submitted < SUBMITS {
            while submitted - collected > IN_FLIGHT - BURST {
                collected += self.collect();
            }
            let begin = Instant::now();
            for _ in 0..BURST {
                while !self.submit() {
                    collected += self.collect();
                }
            }
            ns += begin.elapsed().as_nanos();
            submitted += BURST;
        }
        while collected < submitted {
            collected += self.collect();
        }
        ns as f64 / submitted as f64
    }

    /// The median round trip of a pass after the worker had nothing to do for 5 ms.
    pub(crate) fn rtt_idle_ns(&mut self) -> f64 {
        let times = (0..IDLE_ROUND_TRIPS).map(|_| {
            std::thread::sleep(IDLE);
            let begin = Instant::now();
            self.pump(1);
            begin.elapsed().as_nanos() as f64
        });
        median(times)
    }

    /// The round trip of one pass after another: the median of batches.
    pub(crate) fn rtt_depth1_ns(&mut self) -> f64 {
        let times = (0..BATCHES).map(|_| {
            let begin = Instant::now();
            for _ in 0..BATCH {
                self.pump(1);
            }
            begin.elapsed().as_nanos() as f64 / BATCH as f64
        });
        median(times)
    }

    /// Submits and collects until so many came back, with as many in flight as may be.
    #[inline]
    fn pump(&mut self, passes: u64) {
        self.asked += passes;
        let (mut submitted, mut collected) = (0, 0);
        while collected < passes {
            while submitted < passes && submitted - collected < IN_FLIGHT && self.submit() {
                submitted += 1;
            }
            collected += self.collect();
        }
    }

    #[inline]
    fn submit(&self) -> bool {
        match self.client.submit(&self.pass) {
            Ok(_) => true,
            Err(SubmitError::Busy(_)) => false,
            Err(error) => panic!("a pass was refused: {error}"),
        }
    }

    #[inline]
    fn collect(&mut self) -> u64 {
        let (returned, args) = (&mut self.returned, &self.pass.args);
        self.client.poll(|completion| {
            let is_right =
                matches!(&completion.outcome, PassOutcome::Returned(bytes) if bytes == args);
            *returned += u64::from(is_right);
        }) as u64
    }
}

/// The share of a core that a worker process takes while there is nothing to do.
pub(crate) fn idle_cpu_percent() -> f64 {
    let bench = Bench::open(Spin::Adaptive);
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
