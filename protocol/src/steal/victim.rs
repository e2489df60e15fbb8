//! Whom to steal from: what a trip is worth, and the choice among those that are.

use std::time::Duration;

use crate::time::micros;

/// What is known of a possible victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prospect {
    /// Jobs that it would give to a thief.
    pub stealable: u32,
    /// How long one of its jobs holds a slot, in microseconds; 0 while unknown.
    pub service_us: u32,
    /// Jobs that it runs at once.
    pub slots: u32,
    /// The round trip to it and the transfer in the store; zero while unmeasured.
    pub cost: Duration,
}

/// What a job is thought to take where none has run yet, to compare with others.
const SERVICE_US_ASSUMED: u32 = 10_000;

impl Prospect {
    /// How long it would need to work its backlog off by itself, in microseconds.
    pub fn drain_us(&self) -> u64 {
        let service = if self.service_us == 0 { SERVICE_US_ASSUMED } else { self.service_us };
        u64::from(self.stealable) * u64::from(service) / u64::from(self.slots.max(1))
    }

    /// Whether its jobs would start sooner here than there. What is unknown counts as worth it: one
    /// trip makes it known.
    pub fn is_worth_a_trip(&self) -> bool {
        let unknown = self.service_us == 0 || self.cost.is_zero();
        self.stealable > 0 && (unknown || self.drain_us() > micros(self.cost))
    }
}

/// The better of two random prospects, by the time they need to drain: always taking the fullest
/// would send every thief to the same victim. The two may be the same one, so that the least of
/// them is chosen now and then too. Source: Mitzenmacher, *The power of two choices in randomized
/// load balancing* (IEEE TPDS 2001).
pub fn better_of_two(rng: &mut fastrand::Rng, prospects: &[Prospect]) -> Option<usize> {
    if prospects.is_empty() {
        return None;
    }
    let (a, b) = (rng.usize(..prospects.len()), rng.usize(..prospects.len()));
    Some(if prospects[b].drain_us() > prospects[a].drain_us() { b } else { a })
}
