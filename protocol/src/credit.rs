//! How many jobs an executor takes beyond its slots.
//!
//! The commit of a job's start takes time, and a slot that waits for it is idle. So an executor asks
//! for some jobs more than it has slots, and starts them while the others run. One is enough where a
//! start is quick beside a job; where jobs are short or the store is slow, it takes as many as finish
//! while one starts. Never more than the slots again: what is started here can be stolen no more.

use std::time::Duration;

use crate::time::micros;

/// The credits of one executor.
#[derive(Clone, Debug)]
pub struct CreditLine {
    slots: usize,
    /// Credits that are unspent, or whose job has not left its slot.
    granted: usize,
    start_us: u64,
    service_us: u64,
}

impl CreditLine {
    /// The line of an executor with so many slots, of which none is granted yet. Without slots it
    /// stays so.
    pub fn new(slots: usize) -> Self {
        Self { slots, granted: 0, start_us: 0, service_us: 0 }
    }

    /// Credits to give out now, on top of those before.
    pub fn grant(&mut self) -> usize {
        let more = self.target().saturating_sub(self.granted);
        self.granted += more;
        more
    }

    /// So many jobs have left: each gives its credit back.
    pub fn give_back(&mut self, jobs: usize) {
        self.granted = self.granted.saturating_sub(jobs);
    }

    /// A start took so long to commit.
    pub fn observe_start(&mut self, took: Duration) {
        smooth(&mut self.start_us, took);
    }

    /// A job held its slot for so long.
    pub fn observe_service(&mut self, took: Duration) {
        smooth(&mut self.service_us, took);
    }

    /// Smoothed time that a job holds its slot, in microseconds; 0 while none has.
    pub fn service_us(&self) -> u64 {
        self.service_us
    }

    fn target(&self) -> usize {
        if self.slots == 0 {
            return 0;
        }
        let finish_meanwhile = match self.service_us {
            0 => 0,
            service => (self.slots as u64).saturating_mul(self.start_us).div_ceil(service),
        };
        // One more than finish on average: starts are not evenly spaced.
        let ahead = usize::try_from(finish_meanwhile.saturating_add(1)).unwrap_or(usize::MAX);
        self.slots.saturating_add(ahead.min(self.slots))
    }
}

fn smooth(known: &mut u64, sample: Duration) {
    let us = micros(sample).max(1);
    *known = if *known == 0 { us } else { known.saturating_mul(7).saturating_add(us) / 8 };
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn one_is_ahead_until_starts_are_known_to_be_slow() {
        let mut line = CreditLine::new(4);
        assert_eq!(line.grant(), 5, "slots + 1");
        assert_eq!(line.grant(), 0);
        line.observe_service(ms(1_000));
        line.observe_start(Duration::ZERO);
        line.give_back(1);
        assert_eq!(line.grant(), 2, "a start that takes any time is covered");
    }

    #[test]
    fn as_many_are_ahead_as_finish_while_one_starts_up_to_the_slots() {
        let mut line = CreditLine::new(8);
        line.observe_service(ms(20));
        line.observe_start(ms(5));
        assert_eq!(line.grant(), 8 + 2 + 1);
        for _ in 0..100 {
            line.observe_start(ms(500));
        }
        assert_eq!(line.grant(), 16 - 11, "never more than twice the slots");
        for _ in 0..100 {
            line.observe_start(Duration::ZERO);
        }
        line.give_back(3);
        assert_eq!(line.grant(), 0, "granted too many: the next to leave is not replaced");
        line.give_back(4);
        assert_eq!(line.grant(), 1);
    }

    #[test]
    fn without_slots_nothing_is_granted() {
        let mut line = CreditLine::new(0);
        line.observe_start(ms(1));
        line.observe_service(ms(1));
        assert_eq!(line.grant(), 0);
    }
}
