//! What each side is asked to do, in code that is the same for all.

use std::time::Instant;

use super::{IDLE, median};

/// Passes under way at most: what a client of ours has by default.
pub(crate) const IN_FLIGHT: u64 = 512;
/// Passes before the clock starts.
const WARM_UP: u64 = 50_000;
/// Passes of one measurement of throughput.
const PASSES: u64 = 2_000_000;
/// Passes of one measurement of submitting.
const SUBMITS: u64 = 500_000;
/// Submissions between two readings of the clock.
const BURST: u64 = 64;
/// Round trips of one measurement.
const ROUND_TRIPS: usize = 100;

/// One way to hand passes to a worker and to get their results.
pub(crate) trait Client {
    /// Submits a pass; false if there is no room.
    fn submit(&mut self) -> bool;

    /// Takes the results that are there, and checks each. How many.
    fn collect(&mut self) -> u64;

    /// Results that were not what was submitted.
    fn wrong(&self) -> u64;
}

/// Passes a second with 512 in flight. Every one is accepted and comes back.
pub(crate) fn throughput_per_s(client: &mut impl Client) -> f64 {
    pump(client, WARM_UP);
    let begin = Instant::now();
    pump(client, PASSES);
    let per_s = PASSES as f64 / begin.elapsed().as_secs_f64();
    assert_all_right(client);
    per_s
}

/// Submits and collects until so many came back, with as many in flight as may be.
pub(crate) fn pump(client: &mut impl Client, passes: u64) {
    let (mut submitted, mut collected) = (0, 0);
    while collected < passes {
        while submitted < passes && submitted - collected < IN_FLIGHT && client.submit() {
            submitted += 1;
        }
        collected += client.collect();
    }
}

/// What submitting costs, in nanoseconds for each accepted pass.
pub(crate) struct SubmitNs {
    /// The submissions alone, in bursts of 64, each after room for it was made. Retries count.
    pub(crate) burst: f64,
    /// Submissions without a pause, with the collecting that makes room. Retries count.
    pub(crate) sustained: f64,
}

/// Submits while the worker drains, in both ways.
pub(crate) fn submit_ns(client: &mut impl Client) -> SubmitNs {
    pump(client, WARM_UP);
    let burst = burst_ns(client);
    let begin = Instant::now();
    pump_one_by_one(client, SUBMITS);
    let sustained = begin.elapsed().as_nanos() as f64 / SUBMITS as f64;
    assert_all_right(client);
    SubmitNs { burst, sustained }
}

fn burst_ns(client: &mut impl Client) -> f64 {
    let (mut submitted, mut collected, mut ns) = (0, 0, 0);
    while submitted < SUBMITS {
        while submitted - collected > IN_FLIGHT - BURST {
            collected += client.collect();
        }
        let begin = Instant::now();
        for _ in 0..BURST {
            while !client.submit() {
                collected += client.collect();
            }
        }
        ns += begin.elapsed().as_nanos();
        submitted += BURST;
    }
    while collected < submitted {
        collected += client.collect();
    }
    ns as f64 / submitted as f64
}

/// As the peer's own benchmark does it: a submission, then a look for results; but what was not
/// accepted is submitted again until it is.
fn pump_one_by_one(client: &mut impl Client, passes: u64) {
    let mut collected = 0;
    for submitted in 0..passes {
        while submitted - collected >= IN_FLIGHT || !client.submit() {
            collected += client.collect();
        }
        collected += client.collect();
    }
    while collected < passes {
        collected += client.collect();
    }
}

/// The median round trip of a pass after the worker had nothing to do for 5 ms.
pub(crate) fn rtt_idle_ns(client: &mut impl Client) -> f64 {
    pump(client, WARM_UP);
    let mut ns = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        std::thread::sleep(IDLE);
        let begin = Instant::now();
        pump(client, 1);
        ns.push(begin.elapsed().as_nanos() as f64);
    }
    assert_all_right(client);
    median(ns)
}

fn assert_all_right(client: &impl Client) {
    assert_eq!(client.wrong(), 0, "results were wrong");
}
