//! When a pass comes back because nobody can run it.
//!
//! Its client looks now and then at what waits. A pass counts as without a worker from the first look
//! at which no living worker had its closure, and anew after any look at which one had.

use std::collections::HashMap;
use std::time::Duration;

use super::{ClosureId, PassId};
use crate::time::Instant;

/// The passes of a client that wait without a worker, and since when.
#[derive(Debug)]
pub struct Unserved {
    after: Duration,
    since: HashMap<PassId, Instant>,
}

impl Unserved {
    /// Passes come back after so long.
    pub fn new(after: Duration) -> Self {
        Self { after, since: HashMap::new() }
    }

    /// A look at everything that waits, and whom it waits for: what comes back now.
    pub fn look(
        &mut self,
        now: Instant,
        waiting: impl IntoIterator<Item = (PassId, ClosureId)>,
        mut is_served: impl FnMut(ClosureId) -> bool,
    ) -> Vec<PassId> {
        let before = std::mem::take(&mut self.since);
        self.since = waiting
            .into_iter()
            .filter(|(_, closure)| !is_served(*closure))
            .map(|(pass, _)| (pass, before.get(&pass).copied().unwrap_or(now)))
            .collect();
        let mut overdue: Vec<PassId> = self
            .since
            .extract_if(|_, since| now.saturating_since(*since) >= self.after)
            .map(|(pass, _)| pass)
            .collect();
        overdue.sort_unstable();
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_micros(100);
    const RESIZE: ClosureId = ClosureId(1);
    const ENCODE: ClosureId = ClosureId(2);

    fn pass(slot: u32, generation: u64) -> PassId {
        PassId { slot, generation }
    }

    fn at(us: u64) -> Instant {
        Instant::from_micros(us)
    }

    #[test]
    fn what_nobody_can_run_comes_back_once_its_time_is_over() {
        let mut unserved = Unserved::new(AFTER);
        let waiting = [(pass(0, 1), RESIZE), (pass(1, 1), ENCODE)];
        let look = |unserved: &mut Unserved, us| {
            unserved.look(at(us), waiting, |closure| closure == ENCODE)
        };
        assert_eq!(look(&mut unserved, 10), []);
        assert_eq!(look(&mut unserved, 109), []);
        assert_eq!(look(&mut unserved, 110), [pass(0, 1)]);
    }

    #[test]
    fn a_worker_that_was_there_for_one_look_starts_the_time_anew() {
        let mut unserved = Unserved::new(AFTER);
        let waiting = [(pass(0, 1), RESIZE)];
        assert_eq!(unserved.look(at(0), waiting, |_| false), []);
        assert_eq!(unserved.look(at(99), waiting, |_| true), []);
        assert_eq!(unserved.look(at(150), waiting, |_| false), []);
        assert_eq!(unserved.look(at(249), waiting, |_| false), []);
        assert_eq!(unserved.look(at(250), waiting, |_| false), [pass(0, 1)]);
    }

    #[test]
    fn the_next_pass_of_a_slot_has_its_own_time() {
        let mut unserved = Unserved::new(AFTER);
        assert_eq!(unserved.look(at(0), [(pass(0, 1), RESIZE)], |_| false), []);
        assert_eq!(unserved.look(at(100), [(pass(0, 2), RESIZE)], |_| false), []);
        assert_eq!(unserved.look(at(200), [(pass(0, 2), RESIZE)], |_| false), [pass(0, 2)]);
    }
}
