//! A watchdog's look at the heartbeat table, with no one dead.
//!
//! Ours is timed with the reading of the clock that it needs; the peer's has none, since it counts
//! its own scans. All rows beat every 10 ms.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::reclaimer::{Heart, ReclaimerOptions};
use meshwork_protocol::pass::beats::Beats;
use meshwork_protocol::time;
use rustix::time::{ClockId, clock_gettime};

use super::peer::start_scheduler;
use super::worker::shared_directory;

/// Scans of one measurement.
const SCANS: u32 = 200_000;

/// How often every row beats.
const BEAT_EVERY: Duration = Duration::from_millis(10);

/// Which rows of the table are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Occupied {
    /// Every row, each with a heart that beats.
    All,
    /// One, as in the peer's own benchmark.
    One,
}

impl fmt::Display for Occupied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all rows taken",
            Self::One => "one row taken",
        })
    }
}

impl Occupied {
    fn rows(self, slots: usize) -> usize {
        match self {
            Self::All => slots,
            Self::One => 1,
        }
    }
}

/// Nanoseconds of one of our scans.
pub(super) fn ours_ns(slots: usize, occupied: Occupied) -> Result<f64> {
    let directory = shared_directory()?;
    let host = PassHost::open(directory.path(), None)?;
    let seats = (0..occupied.rows(slots))
        .map(|_| host.join_worker("bench"))
        .collect::<Result<Vec<_>, _>>()?;
    let heart = Heart::new(&host);
    let beating = Beating::start(move || heart.beat())?;
    let mut beats = Beats::new(slots, ReclaimerOptions::default().grace);
    let rows = host.ring().beats().get(..slots).context("the table has fewer rows")?;
    let mut suspects = 0u32;
    let ns = time_scans(|| beats.scan(coarse_now(), black_box(rows), |_| suspects += 1));
    drop(beating);
    for seat in seats {
        host.leave_worker(seat);
    }
    ensure!(suspects == 0, "{suspects} living workers were suspected");
    Ok(ns)
}

/// Microseconds of the coarse clock, which moves every few milliseconds: enough for a grace of
/// hundreds.
fn coarse_now() -> time::Instant {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    time::Instant::from_micros(
        now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000,
    )
}

/// Nanoseconds of one of the peer's scans.
pub(super) fn peer_ns(slots: usize, occupied: Occupied) -> Result<f64> {
    let directory = shared_directory()?;
    let scheduler = start_scheduler(directory.path(), slots)?;
    let table = scheduler.heartbeat();
    // The scheduler has taken the first row.
    for _ in 1..occupied.rows(slots) {
        table
            .register(std::process::id())
            .map_err(|error| anyhow!("the peer has no row: {error:?}"))?;
    }
    let rows = occupied.rows(slots);
    let beating = Beating::start(move || (0..rows).for_each(|row| table.beat(row)))?;
    let mut dead = 0;
    let ns = time_scans(|| dead += scheduler.watchdog_scan().dead_slots.len());
    drop(beating);
    ensure!(dead == 0, "{dead} living workers were declared dead");
    Ok(ns)
}

fn time_scans(mut scan: impl FnMut()) -> f64 {
    (0..SCANS / 10).for_each(|_| scan());
    let begin = Instant::now();
    (0..SCANS).for_each(|_| scan());
    begin.elapsed().as_nanos() as f64 / f64::from(SCANS)
}

/// A thread that makes hearts beat until this is dropped.
struct Beating {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beating {
    fn start(beat: impl Fn() + Send + 'static) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("heart".to_owned()).spawn(move || {
            while !stopped.load(Acquire) {
                beat();
                std::thread::sleep(BEAT_EVERY);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        self.stop.store(true, Release);
        if let Some(thread) = self.thread.take() {
            // It has nothing to panic on.
            let _ = thread.join();
        }
    }
}
