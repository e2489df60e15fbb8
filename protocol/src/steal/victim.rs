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
    /// Jobs that it would have to give for the two to be equally busy.
    pub surplus: u32,
}

/// What a job is thought to take where none has run yet, to compare with others.
const SERVICE_US_ASSUMED: u32 = 10_000;

impl Prospect {
    /// How long it would need to work its backlog off by itself, in microseconds.
    pub fn drain_us(&self) -> u64 {
        let service = if self.service_us == 0 { SERVICE_US_ASSUMED } else { self.service_us };
        u64::from(self.stealable) * u64::from(service) / u64::from(self.slots.max(1))
    }

    /// Whether it is busier than this node, and its jobs would start sooner here than there. What is
    /// unknown counts as worth it: one trip makes it known.
    pub fn is_worth_a_trip(&self) -> bool {
        let unknown = self.service_us == 0 || self.cost.is_zero();
        let outlasts = unknown || self.drain_us() > micros(self.cost);
        self.stealable > 0 && self.surplus > 0 && outlasts
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prospect(stealable: u32, service_us: u32, slots: u32, cost_us: u64) -> Prospect {
        Prospect { stealable, service_us, slots, cost: Duration::from_micros(cost_us), surplus: 1 }
    }

    #[test]
    fn a_backlog_is_worth_a_trip_if_it_outlasts_the_trip() {
        assert_eq!(prospect(30, 20_000, 4, 0).drain_us(), 150_000);
        assert!(!prospect(30, 20_000, 4, 150_000).is_worth_a_trip());
        assert!(prospect(31, 20_000, 4, 150_000).is_worth_a_trip());
        assert!(!prospect(3, 10_000, 1, 30_001).is_worth_a_trip(), "10 ms jobs over 3 round trips");
    }

    #[test]
    fn the_work_of_a_node_no_busier_than_this_one_is_not_worth_a_trip() {
        let busier = prospect(30, 20_000, 4, 1_000);
        assert!(busier.is_worth_a_trip());
        assert!(!Prospect { surplus: 0, ..busier }.is_worth_a_trip());
    }

    #[test]
    fn what_is_unknown_is_worth_a_trip_and_nothing_is_not() {
        assert!(prospect(1, 0, 4, 1_000_000).is_worth_a_trip());
        assert!(prospect(1, 1, 4, 0).is_worth_a_trip());
        assert!(!prospect(0, 0, 0, 0).is_worth_a_trip());
        assert_eq!(prospect(u32::MAX, u32::MAX, 0, 0).drain_us(), u64::from(u32::MAX).pow(2));
    }

    #[test]
    fn the_better_of_two_leaves_something_for_every_victim() {
        let prospects =
            [prospect(10, 1_000, 1, 0), prospect(100, 1_000, 1, 0), prospect(50, 1_000, 1, 0)];
        let mut rng = fastrand::Rng::with_seed(7);
        let mut chosen = [0; 3];
        for _ in 0..9_000 {
            chosen[better_of_two(&mut rng, &prospects).unwrap()] += 1;
        }
        // Of nine pairs, one has only the least, three at best the middle one, five the best.
        for (n, of_nine) in chosen.into_iter().zip([1, 5, 3]) {
            assert!((of_nine * 1_000 - 150..of_nine * 1_000 + 150).contains(&n), "{chosen:?}");
        }
        assert_eq!(better_of_two(&mut rng, &[]), None);
    }
}
