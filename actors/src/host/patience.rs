//! How long to spin before sleeping: while the expected wait is shorter than a wake.

use std::time::{Duration, Instant};

/// What a wake of a sleeping thread costs, from the call to its first instruction: 22 to 52
/// microseconds were measured.
const WAKE: Duration = Duration::from_micros(50);

/// Looks between two readings of the clock.
const LOOKS: u32 = 64;

/// Finds in a row after which a look in vain lets work gather, and for how many pauses of the
/// processor (about 40 ns each).
const GATHER_FROM: u32 = 4;
const GATHER_PAUSES: u32 = 20;

/// A wait counts at most this long in the expectation, so that one quiet night does not make the
/// first busy minute slow.
const WAIT_MAX: Duration = Duration::from_millis(1);

/// What a thread does while it has nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spin {
    /// Sleeps at once: best where there are more threads than processors.
    Never,
    /// Spins while the next work is expected sooner than a wake would take.
    #[default]
    Adaptive,
    /// Never sleeps: takes a processor for itself.
    Always,
}

/// A thread's expectation of its next wait.
#[derive(Debug)]
pub struct Patience {
    spin: Spin,
    looks: u32,
    /// Finds in a row, without a look in vain.
    finds: u32,
    since: Option<Instant>,
    /// Smoothed over the last waits.
    expected: Duration,
}

impl Patience {
    /// A thread that expects work at once.
    pub fn new(spin: Spin) -> Self {
        Self { spin, looks: 0, finds: 0, since: None, expected: Duration::ZERO }
    }

    /// There was work.
    #[inline(always)]
    pub fn found(&mut self) {
        self.finds += 1;
        if self.looks > 0 {
            self.end_of_wait();
        }
    }

    /// The first look in vain after a row of finds: work comes faster than it is looked for, so let
    /// some gather.
    #[inline(always)]
    fn let_gather(&mut self) {
        let finds = std::mem::take(&mut self.finds);
        if finds >= GATHER_FROM {
            for _ in 0..GATHER_PAUSES {
                std::hint::spin_loop();
            }
        }
    }

    #[inline(never)]
    fn end_of_wait(&mut self) {
        let waited = self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.expected = (self.expected * 7 + waited.min(WAIT_MAX)) / 8;
        self.looks = 0;
    }

    /// There was none: whether to look again at once, rather than to sleep.
    #[inline(always)]
    pub fn look_again(&mut self) -> bool {
        match self.spin {
            Spin::Never => {
                self.looks = 1;
                false
            }
            Spin::Always => {
                self.let_gather();
                std::hint::spin_loop();
                true
            }
            Spin::Adaptive => {
                self.looks += 1;
                self.let_gather();
                std::hint::spin_loop();
                !self.looks.is_multiple_of(LOOKS) || self.is_worth_it()
            }
        }
    }

    #[cold]
    fn is_worth_it(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.expected < WAKE && since.elapsed() < WAKE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_never_spins_sleeps_at_once_and_who_always_does_never() {
        assert!(!Patience::new(Spin::Never).look_again());
        let mut always = Patience::new(Spin::Always);
        assert!((0..10_000).all(|_| always.look_again()));
    }

    #[test]
    fn a_long_wait_is_not_spun_through_when_it_was_expected() {
        let mut patience = Patience::new(Spin::Adaptive);
        patience.expected = WAIT_MAX;
        let looks = (0..10_000).take_while(|_| patience.look_again()).count();
        assert_eq!(looks, LOOKS as usize - 1);
    }

    #[test]
    fn waits_are_learned_and_forgotten() {
        let mut patience = Patience::new(Spin::Adaptive);
        for _ in 0..8 {
            patience.looks = 1;
            patience.since = Instant::now().checked_sub(Duration::from_secs(1));
            patience.found();
        }
        assert!(patience.expected > WAKE, "{:?}", patience.expected);
        for _ in 0..32 {
            patience.looks = 1;
            patience.found();
        }
        assert!(patience.expected < WAKE, "{:?}", patience.expected);
    }
}
