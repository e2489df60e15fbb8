//! When to look again, and when to sleep.
//!
//! A wake costs tens of microseconds and a look tens of nanoseconds, so whoever waits spins while the
//! next work is expected sooner than a wake would take. And where work comes faster than it is looked
//! for, it is left to gather for a moment: each look takes the lines that it comes on away from who
//! makes it.

use std::time::Duration;

use crate::limits::PASS_CLIENT_SLOTS_MAX;
use crate::time::Instant;

/// What a wake of a sleeping thread costs, from the call to its first instruction: 22 to 52
/// microseconds were measured.
const WAKE: Duration = Duration::from_micros(50);

/// Looks between two readings of the clock.
const LOOKS: u32 = 64;

/// Finds in a row after which a worker's look in vain lets work gather, for how many pauses of the
/// processor (about 40 ns each), and how many looks in vain end a row: the reply to one pass, and the
/// next of who waits for it, take longer.
const GATHER_FINDS: u32 = 4;
const WORKER_PAUSES: u32 = 20;
const ROW_ENDS: u32 = 3;

/// Passes under way from which on a client that waits for replies lets them gather, and for how many
/// pauses: less than a microsecond, when there are many times that to do.
const GATHER_UNDER_WAY: u32 = 64;
const CLIENT_PAUSES: u32 = 12;

/// Passes under way from which on a client that submits between its polls does not look at each of
/// them, and how long after a look it looks again.
const SKIP_UNDER_WAY: u32 = 2;
const LOOK_AGAIN: Duration = Duration::from_micros(2);

/// A wait counts at most this long in the expectation, so that one quiet night does not make the
/// first busy minute slow.
const WAIT_MAX: Duration = Duration::from_millis(1);

/// How long a client's own attention goes on after the last reply: a small part of a wake.
const ATTENTION: Duration = Duration::from_micros(3);

/// Times in a row that attention is in vain before it is paid only at every so many submissions.
const HOPES: u32 = 8;
const HOPELESS_TRIES: u32 = 64;

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

/// What to do after a look in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again, after so many pauses of the processor.
    Look {
        /// At least one.
        pauses: u32,
    },
    /// Sleep until woken.
    Sleep,
}

/// A thread's expectation of its next wait.
#[derive(Debug)]
pub struct Patience {
    spin: Spin,
    looks: u32,
    /// Finds in a row, with at most a few looks in vain between two.
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
    pub fn found(&mut self, now: impl FnOnce() -> Instant) {
        self.finds = self.finds.saturating_add(1);
        if self.looks > 0 {
            self.end_of_wait(now);
        }
    }

    #[inline(never)]
    fn end_of_wait(&mut self, now: impl FnOnce() -> Instant) {
        let waited =
            self.since.take().map_or(Duration::ZERO, |since| now().saturating_since(since));
        self.expected = (self.expected * 7 + waited.min(WAIT_MAX)) / 8;
        self.looks = 0;
    }

    /// There was none.
    #[inline(always)]
    pub fn nothing(&mut self, now: impl FnOnce() -> Instant) -> Next {
        self.looks = self.looks.wrapping_add(1).max(1);
        let mut pauses = 1;
        if self.finds >= GATHER_FINDS {
            pauses = WORKER_PAUSES;
            self.finds = 0;
        } else if self.looks >= ROW_ENDS {
            self.finds = 0;
        }
        let looks = match self.spin {
            Spin::Never => false,
            Spin::Always => true,
            Spin::Adaptive => !self.looks.is_multiple_of(LOOKS) || self.is_worth_it(now),
        };
        if looks { Next::Look { pauses } } else { Next::Sleep }
    }

    #[cold]
    fn is_worth_it(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let now = now();
        let since = *self.since.get_or_insert(now);
        self.expected < WAKE && now.saturating_since(since) < WAKE
    }
}

const _: () = assert!(PASS_CLIENT_SLOTS_MAX <= u16::MAX as u32, "`LastPoll` counts them");

/// When a client that polls looks for replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// Now.
    Now,
    /// After so many pauses of the processor.
    After(u32),
    /// Not at this poll: it will submit more.
    Skip,
}

/// What a client last saw when it polled, in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastPoll {
    under_way: u16,
    /// When it looked, if it had submitted before.
    looked: Instant,
}

impl LastPoll {
    /// A poll with so many passes under way.
    #[inline(always)]
    pub fn poll(&mut self, under_way: u32, now: impl FnOnce() -> Instant) -> Poll {
        let has_submitted = under_way > u32::from(self.under_way);
        self.under_way = under_way as u16;
        if has_submitted && under_way >= SKIP_UNDER_WAY {
            let now = now();
            if now.saturating_since(self.looked) < LOOK_AGAIN {
                return Poll::Skip;
            }
            self.looked = now;
        } else if under_way >= GATHER_UNDER_WAY {
            return Poll::After(CLIENT_PAUSES);
        }
        Poll::Now
    }

    /// After that so many replies were collected.
    #[inline(always)]
    pub fn collected(&mut self, replies: u32) {
        self.under_way = u32::from(self.under_way).saturating_sub(replies) as u16;
    }

    /// The word: `looked:48 | under way:16`.
    #[inline(always)]
    pub fn to_bits(self) -> u64 {
        self.looked.as_micros() << 16 | u64::from(self.under_way)
    }

    /// What a word says.
    #[inline(always)]
    pub fn from_bits(bits: u64) -> Self {
        Self { under_way: bits as u16, looked: Instant::from_micros(bits >> 16) }
    }
}

/// Whether a client that has submitted should look for the reply itself, rather than leave it to the
/// thread that sleeps until it comes: worth it while replies come within a few microseconds.
#[derive(Debug)]
pub struct Hope {
    left: u32,
    tries: u32,
}

impl Default for Hope {
    fn default() -> Self {
        Self { left: HOPES, tries: 0 }
    }
}

impl Hope {
    /// Whether to look now.
    pub fn is_worth_it(&mut self) -> bool {
        if self.left > 0 {
            return true;
        }
        self.tries = self.tries.wrapping_add(1);
        self.tries.is_multiple_of(HOPELESS_TRIES)
    }

    /// Whether to look on, so long after the last reply.
    #[inline]
    pub fn goes_on(since_last: Duration) -> bool {
        since_last < ATTENTION
    }

    /// It was over, and had found something or nothing.
    pub fn ended(&mut self, found: bool) {
        self.left = if found { HOPES } else { self.left.saturating_sub(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> impl FnOnce() -> Instant {
        move || Instant::from_micros(us)
    }

    fn looks_before_sleep(patience: &mut Patience, us_a_look: u64) -> usize {
        let looks = |look: &u64| patience.nothing(at(*look * us_a_look)) != Next::Sleep;
        (0..1_000_000).take_while(looks).count()
    }

    #[test]
    fn who_never_spins_sleeps_at_once_and_who_always_does_never() {
        assert_eq!(Patience::new(Spin::Never).nothing(at(0)), Next::Sleep);
        assert_eq!(looks_before_sleep(&mut Patience::new(Spin::Always), 1), 1_000_000);
    }

    #[test]
    fn a_spin_lasts_as_long_as_a_wake_on_the_clock() {
        // The clock is read at the 64th look, and counts from there.
        assert_eq!(looks_before_sleep(&mut Patience::new(Spin::Adaptive), 1), 127);
    }

    #[test]
    fn a_long_wait_is_not_spun_through_when_it_was_expected() {
        let mut patience = Patience::new(Spin::Adaptive);
        patience.expected = WAIT_MAX;
        assert_eq!(looks_before_sleep(&mut patience, 0), LOOKS as usize - 1);
    }

    #[test]
    fn waits_are_learned_and_forgotten() {
        let mut patience = Patience::new(Spin::Adaptive);
        for _ in 0..8 {
            patience.looks = 1;
            patience.since = Some(Instant::ZERO);
            patience.found(at(1_000_000));
        }
        assert!(patience.expected > WAKE, "{:?}", patience.expected);
        for _ in 0..32 {
            patience.looks = 1;
            patience.found(at(1_000_000));
        }
        assert!(patience.expected < WAKE, "{:?}", patience.expected);
    }

    #[test]
    fn work_is_left_to_gather_once_after_a_row_of_finds() {
        let mut patience = Patience::new(Spin::Always);
        (0..GATHER_FINDS).for_each(|_| patience.found(at(0)));
        assert_eq!(patience.nothing(at(0)), Next::Look { pauses: WORKER_PAUSES });
        assert_eq!(patience.nothing(at(0)), Next::Look { pauses: 1 });
        // One at a time, with a look in vain between.
        let mut looks = Vec::new();
        for _ in 0..GATHER_FINDS {
            patience.found(at(0));
            looks.push(patience.nothing(at(0)));
        }
        assert_eq!(looks.last(), Some(&Next::Look { pauses: WORKER_PAUSES }));
        // With more than that between them, it is somebody who waits for each reply.
        for _ in 0..2 * GATHER_FINDS {
            patience.found(at(0));
            let looks = (0..ROW_ENDS).map(|_| patience.nothing(at(0)));
            assert!(looks.into_iter().all(|next| next == Next::Look { pauses: 1 }));
        }
    }

    #[test]
    fn a_client_that_submits_between_its_polls_looks_every_few_microseconds() {
        let mut last = LastPoll::default();
        let looks: Vec<Poll> = (1..=17).map(|n| last.poll(n, at(100 + u64::from(n) / 2))).collect();
        assert_eq!(looks[0], Poll::Now);
        for four in looks[1..].chunks(4) {
            assert_eq!(four, [Poll::Now, Poll::Skip, Poll::Skip, Poll::Skip]);
        }
    }

    #[test]
    fn a_client_that_waits_looks_at_each_poll() {
        let mut last = LastPoll::default();
        assert_eq!(last.poll(100, at(7)), Poll::Now);
        assert_eq!(last.poll(101, at(7)), Poll::Skip);
        for _ in 0..20 {
            assert_eq!(last.poll(101, at(7)), Poll::After(CLIENT_PAUSES));
        }
        last.collected(61);
        assert_eq!(last.poll(40, at(7)), Poll::Now);
        // It has submitted after another client thread collected.
        last.collected(10);
        assert_eq!(last.poll(40, at(8)), Poll::Skip);
        assert_eq!(LastPoll::from_bits(last.to_bits()), last);
    }

    #[test]
    fn hope_that_was_in_vain_is_tried_seldom_until_it_is_not() {
        let mut hope = Hope::default();
        for _ in 0..HOPES {
            assert!(hope.is_worth_it());
            hope.ended(false);
        }
        let tries = (0..4 * HOPELESS_TRIES).filter(|_| hope.is_worth_it()).count();
        assert_eq!(tries, 4);
        hope.ended(true);
        assert!(hope.is_worth_it() && hope.is_worth_it());
        assert!(Hope::goes_on(Duration::ZERO) && !Hope::goes_on(ATTENTION));
    }
}
