//! Local health: how much this node should trust its own view, after Lifeguard.
//!
//! The score counts signs that this node, and not the others, is slow: its own timers fire late, it
//! had to refute, its probes fail while helpers stay silent too. A node with a bad score probes more
//! slowly and waits longer; a round in which it was late itself accuses nobody.

use std::time::Duration;

/// The worst score; a period is stretched to at most this plus one. Lifeguard's `S`.
const SCORE_MAX: u32 = 8;

/// A timer that fires later than this part of a period was held up by this node itself.
const LATE_PART: u32 = 4;

/// Whether a timer that fired so late voids the round.
pub fn is_late(lateness: Duration, period: Duration) -> bool {
    lateness > period / LATE_PART
}

/// The score: 0 is well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    score: u32,
}

impl Health {
    /// A probed member answered in time.
    pub fn probe_answered(&mut self) {
        self.score = self.score.saturating_sub(1);
    }

    /// A probe failed, and this many helpers that should have reported failure were silent as well.
    /// With no helper to ask, the failure itself counts.
    pub fn probe_failed(&mut self, helpers: usize, silent: usize) {
        let by = if helpers == 0 { 1 } else { u32::try_from(silent).unwrap_or(SCORE_MAX) };
        self.worsen(by);
    }

    /// Someone called this node suspect or dead.
    pub fn accused(&mut self) {
        self.worsen(1);
    }

    /// This node's own timer fired late.
    pub fn late(&mut self) {
        self.worsen(1);
    }

    fn worsen(&mut self, by: u32) {
        self.score = self.score.saturating_add(by).min(SCORE_MAX);
    }

    /// The score.
    pub fn score(&self) -> u32 {
        self.score
    }

    /// A period as long as this node's health asks for.
    pub fn stretched(&self, period: Duration) -> Duration {
        period * (self.score + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_of_helpers_counts_against_oneself_and_answers_mend_it() {
        let mut health = Health::default();
        health.probe_failed(3, 0);
        assert_eq!(health.score(), 0, "three helpers saw the same: the target is gone, not I");
        health.probe_failed(3, 2);
        health.accused();
        health.late();
        assert_eq!(health.stretched(Duration::from_millis(100)), Duration::from_millis(500));
        health.probe_failed(3, 100);
        assert_eq!(health.score(), SCORE_MAX);
        (0..10).for_each(|_| health.probe_answered());
        assert_eq!(health.score(), 0);
    }

    #[test]
    fn a_quarter_of_a_period_is_late() {
        let period = Duration::from_millis(100);
        assert!(!is_late(Duration::from_millis(25), period));
        assert!(is_late(Duration::from_millis(26), period));
    }
}
