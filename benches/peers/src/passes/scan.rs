//! A watchdog's look at the heartbeat table, with no one dead.
//!
//! Ours is timed with the reading of the clock that it needs; the peer's has none, since it counts
//! its own scans. All rows beat every 10 ms.

use std::fmt;

use anyhow::{Result, anyhow, ensure};

use super::common::scan::{self, Beating};
use super::common::shared_directory;
use super::peer::start_scheduler;

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
pub(super) fn ours_ns(slots: usize, occupied: Occupied) -> f64 {
    scan::scan_ns(slots, occupied.rows(slots))
}

/// Nanoseconds of one of the peer's scans.
pub(super) fn peer_ns(slots: usize, occupied: Occupied) -> Result<f64> {
    let directory = shared_directory();
    let scheduler = start_scheduler(directory.path(), slots)?;
    let table = scheduler.heartbeat();
    // The scheduler has taken the first row.
    for _ in 1..occupied.rows(slots) {
        table
            .register(std::process::id())
            .map_err(|error| anyhow!("the peer has no row: {error:?}"))?;
    }
    let rows = occupied.rows(slots);
    let beating = Beating::start(move || (0..rows).for_each(|row| table.beat(row)));
    let mut dead = 0;
    let ns = scan::time_scans(|| dead += scheduler.watchdog_scan().dead_slots.len());
    drop(beating);
    ensure!(dead == 0, "{dead} living workers were declared dead");
    Ok(ns)
}
