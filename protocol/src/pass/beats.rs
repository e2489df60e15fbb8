//! Whose heart stands still: the watchdog's look at the heartbeat table.
//!
//! Suspicion only: a row whose beat has not changed for a while, by the observer's own clock, is
//! worth a look at its lock. Death is proved by the lock alone, so a long pass, a busy machine or a
//! clock that jumps costs a look and never a worker.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::atomic::AtomicWord;
use crate::time::{Instant, micros};

/// The beat of a row that nobody has.
pub const NO_BEAT: u64 = 0;

/// What one observer has seen of the heartbeat table.
#[derive(Clone, Debug)]
pub struct Beats {
    grace_us: u64,
    seen: Vec<Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    beat: u64,
    since_us: u64,
}

impl Beats {
    /// An observer of so many rows, that suspects one whose beat stands still for `grace`.
    pub fn new(rows: usize, grace: Duration) -> Self {
        Self { grace_us: micros(grace), seen: vec![Seen::default(); rows] }
    }

    /// Looks at every row once, and calls `suspect` for each that stands still. A row that is
    /// suspected is suspected again after another `grace`.
    #[inline]
    pub fn scan<W: AtomicWord>(
        &mut self,
        now: Instant,
        beats: &[W],
        mut suspect: impl FnMut(usize),
    ) {
        let now_us = now.as_micros();
        for (index, (row, seen)) in beats.iter().zip(&mut self.seen).enumerate() {
            let beat = row.load(Relaxed);
            if beat == NO_BEAT {
                seen.beat = NO_BEAT;
            } else if beat != seen.beat {
                *seen = Seen { beat, since_us: now_us };
            } else if now_us.saturating_sub(seen.since_us) >= self.grace_us {
                seen.since_us = now_us;
                suspect(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn suspects(beats: &mut Beats, at_ms: u64, rows: &[AtomicU64]) -> Vec<usize> {
        let mut found = Vec::new();
        beats.scan(Instant::from_micros(at_ms * 1_000), rows, |row| found.push(row));
        found
    }

    #[test]
    fn a_heart_that_stands_still_is_suspected_and_one_that_beats_is_not() {
        let rows = [AtomicU64::new(1), AtomicU64::new(1), AtomicU64::new(NO_BEAT)];
        let mut beats = Beats::new(3, Duration::from_millis(300));
        assert_eq!(suspects(&mut beats, 1_000, &rows), []);
        rows[1].store(2, Relaxed);
        assert_eq!(suspects(&mut beats, 1_200, &rows), []);
        assert_eq!(suspects(&mut beats, 1_300, &rows), [0]);
        assert_eq!(suspects(&mut beats, 1_500, &rows), [1]);
    }

    #[test]
    fn a_suspicion_comes_again_after_another_grace() {
        let rows = [AtomicU64::new(7)];
        let mut beats = Beats::new(1, Duration::from_millis(300));
        assert_eq!(suspects(&mut beats, 0, &rows), []);
        assert_eq!(suspects(&mut beats, 300, &rows), [0]);
        assert_eq!(suspects(&mut beats, 500, &rows), []);
        assert_eq!(suspects(&mut beats, 600, &rows), [0]);
    }

    #[test]
    fn a_row_that_changes_hands_starts_anew() {
        let rows = [AtomicU64::new(7)];
        let mut beats = Beats::new(1, Duration::from_millis(300));
        assert_eq!(suspects(&mut beats, 0, &rows), []);
        rows[0].store(NO_BEAT, Relaxed);
        assert_eq!(suspects(&mut beats, 400, &rows), []);
        rows[0].store(7, Relaxed);
        assert_eq!(suspects(&mut beats, 500, &rows), []);
        assert_eq!(suspects(&mut beats, 800, &rows), [0]);
    }
}
