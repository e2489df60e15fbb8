//! How long a suspicion lasts, and the timers of those that stand.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::{Generation, Incarnation, NodeId};
use crate::swim::Member;
use crate::time::{Instant, micros};

/// How much longer than the shortest the longest suspicion is, where confirmations shrink it.
pub const MAX_FACTOR: u32 = 6;

/// Independent confirmations that a suspicion awaits. None yet: a datagram does not say who accuses,
/// so a confirmation could not be told from the repetition of one accusation.
pub const CONFIRMATIONS: u32 = 0;

/// How long a suspicion stands in a mesh of `members`: `multiplier x ln(members + 1) x period`.
pub fn timeout(multiplier: u32, members: usize, period: Duration) -> Duration {
    period.mul_f64(f64::from(multiplier) * (members as f64 + 1.0).ln())
}

/// Lifeguard's shrinking timeout: `max` while nobody else suspects, `min` once `expected` others
/// said so of their own: `max - (max - min) log(confirmations + 1) / log(expected + 1)`.
///
/// With no confirmations to be expected it is `min`: that is plain SWIM.
pub fn shrunk(min: Duration, max: Duration, confirmations: u32, expected: u32) -> Duration {
    if expected == 0 {
        return min;
    }
    let share = (f64::from(confirmations) + 1.0).ln() / (f64::from(expected) + 1.0).ln();
    let shrunk = max.as_secs_f64() - (max.saturating_sub(min)).as_secs_f64() * share;
    Duration::from_secs_f64(shrunk.max(min.as_secs_f64()))
}

/// The suspicions that stand, each with its deadline.
#[derive(Debug, Default)]
pub struct Suspicions {
    by_id: BTreeMap<NodeId, Suspicion>,
    by_deadline: BTreeSet<(Instant, NodeId)>,
}

/// One suspicion: the exact record that is suspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// The boot that is suspected.
    pub generation: Generation,
    /// The incarnation that is suspected; a higher one refutes.
    pub incarnation: Incarnation,
    deadline: Instant,
}

impl Suspicions {
    /// Starts the clock for `member`, unless it runs for this very record.
    pub fn start(&mut self, member: &Member, deadline: Instant) {
        let (generation, incarnation) = (member.generation, member.incarnation);
        if let Some(old) = self.by_id.get(&member.id) {
            if (old.generation, old.incarnation) == (generation, incarnation) {
                return;
            }
            self.by_deadline.remove(&(old.deadline, member.id.clone()));
        }
        self.by_deadline.insert((deadline, member.id.clone()));
        self.by_id.insert(member.id.clone(), Suspicion { generation, incarnation, deadline });
    }

    /// Stops the clock for `id`.
    pub fn stop(&mut self, id: &NodeId) {
        if let Some(old) = self.by_id.remove(id) {
            self.by_deadline.remove(&(old.deadline, id.clone()));
        }
    }

    /// When the first of them ends.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.by_deadline.first().map(|(at, _)| *at)
    }

    /// Takes out one that has ended by `now`.
    pub fn pop_ended(&mut self, now: Instant) -> Option<(NodeId, Suspicion)> {
        if self.next_deadline().is_none_or(|at| at > now) {
            return None;
        }
        let (_, id) = self.by_deadline.pop_first()?;
        let suspicion = self.by_id.remove(&id)?;
        Some((id, suspicion))
    }

    /// Moves every deadline: time in which this node did not listen counts against nobody.
    pub fn postpone(&mut self, by: Duration) {
        self.by_deadline.clear();
        for (id, suspicion) in &mut self.by_id {
            suspicion.deadline = suspicion.deadline + by;
            self.by_deadline.insert((suspicion.deadline, id.clone()));
        }
    }

    /// How many stand.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether none stands.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}

/// `d`, give or take a half: what keeps many nodes from doing one thing at one time.
pub(crate) fn jittered(rng: &mut fastrand::Rng, d: Duration) -> Duration {
    let us = micros(d);
    Duration::from_micros(us / 2 + rng.u64(0..=us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_grows_with_the_logarithm_of_the_mesh() {
        let period = Duration::from_millis(500);
        let ms = |n| timeout(4, n, period).as_millis();
        assert_eq!([ms(1), ms(5), ms(64), ms(1_000)], [1_386, 3_583, 8_348, 13_817]);
    }

    #[test]
    fn lifeguards_golden_values() {
        let (min, max) = (Duration::from_secs(2), Duration::from_secs(30));
        let at = |c| (shrunk(min, max, c, 3).as_secs_f64() * 100.0).round() / 100.0;
        assert_eq!([at(0), at(1), at(2), at(3), at(4)], [30.0, 16.0, 7.81, 2.0, 2.0]);
        assert_eq!(shrunk(min, max, 0, 0), min, "without confirmations it is plain SWIM");
    }
}
