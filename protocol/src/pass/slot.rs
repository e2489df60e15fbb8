//! The slot word: who may touch a slot, and what it may become.
//!
//! `state:4 | attempt:6 | worker:14 | generation:40`, the state in the highest bits.
//!
//! ```text
//!            client: write, then store                worker w: compare-and-set
//!   FREE(g) ───────────────────────────▶ READY(g+1,a) ─────────────────────────▶ CLAIMED(g+1,a,w)
//!     ▲ ▲                                 │   ▲                                    │        │
//!     │ └── client: cancel, time-out ─────┘   └── w is dead: READY(g+1,a+1) ───────┤        │
//!     │        (compare-and-set)                  or, at the attempts' end, DONE ──┤        │
//!     │                                                                            ▼        │
//!     └──────────────── client: collects ───────────────────────────────────── DONE ◀───────┘
//!                                                                      w: compare-and-set
//! ```
//!
//! In FREE and DONE the slot's bytes are the client's, in CLAIMED the worker's, in READY nobody
//! writes them. The living are never robbed: CLAIMED(w) is taken back only by who holds proof that w
//! is dead, so no two ever write the same bytes.

use super::WorkerIndex;
use crate::limits::{PASS_ATTEMPTS_MAX, PASS_WORKERS_MAX};

const GENERATION_BITS: u32 = 40;
pub(super) const WORKER_BITS: u32 = 14;
const ATTEMPT_BITS: u32 = 6;
const STATE_SHIFT: u32 = GENERATION_BITS + WORKER_BITS + ATTEMPT_BITS;
const ATTEMPT_SHIFT: u32 = GENERATION_BITS + WORKER_BITS;

/// The generation's bits. A slot used a million times a second takes twelve days to go through them;
/// then they begin anew, and so do the fencing tokens of its passes.
pub const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

/// Greatest number of an attempt, counted from zero.
pub const ATTEMPT_MAX: u8 = (1 << ATTEMPT_BITS) - 1;

const _: () = assert!(STATE_SHIFT + 4 == 64);
const _: () = assert!(PASS_WORKERS_MAX <= 1 << WORKER_BITS, "a word names its worker");
const _: () = assert!(PASS_ATTEMPTS_MAX == ATTEMPT_MAX, "a word counts its attempts");

/// Whose a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// The client's, and nothing is in it.
    Free,
    /// A call waits for a worker.
    Ready,
    /// A worker runs the call.
    Claimed,
    /// A reply waits for the client.
    Done,
}

/// The word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SlotWord(u64);

impl SlotWord {
    /// The word of a slot that was never used: what zeroed memory holds.
    pub const UNUSED: Self = Self(0);

    /// The word with these bits.
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Its bits.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Its state; `None` for bits that nobody wrote in good faith.
    #[inline]
    pub const fn state(self) -> Option<SlotState> {
        match self.0 >> STATE_SHIFT {
            0 => Some(SlotState::Free),
            1 => Some(SlotState::Ready),
            2 => Some(SlotState::Claimed),
            3 => Some(SlotState::Done),
            _ => None,
        }
    }

    /// Whether a call waits in it.
    #[inline(always)]
    pub const fn is_ready(self) -> bool {
        self.0 >> STATE_SHIFT == SlotState::Ready as u64
    }

    /// Whether a reply waits in it.
    #[inline(always)]
    pub const fn is_done(self) -> bool {
        self.0 >> STATE_SHIFT == SlotState::Done as u64
    }

    /// Which run of the call this is or will be, from zero.
    #[inline(always)]
    pub const fn attempt(self) -> u8 {
        (self.0 >> ATTEMPT_SHIFT) as u8 & ATTEMPT_MAX
    }

    /// Who runs or ran it; meaningless unless claimed or done.
    #[inline(always)]
    pub const fn worker(self) -> WorkerIndex {
        WorkerIndex((self.0 >> GENERATION_BITS) as u16 & ((1 << WORKER_BITS) - 1))
    }

    /// How often the slot was used, modulo 2^40.
    #[inline(always)]
    pub const fn generation(self) -> u64 {
        self.0 & GENERATION_MASK
    }

    #[inline(always)]
    const fn with(state: SlotState, attempt: u8, worker: u16, generation: u64) -> Self {
        Self(
            (state as u64) << STATE_SHIFT
                | (attempt as u64) << ATTEMPT_SHIFT
                | (worker as u64) << GENERATION_BITS
                | generation & GENERATION_MASK,
        )
    }

    /// FREE to READY, in a new generation: the client has written a call.
    #[inline(always)]
    pub const fn ready(self) -> Option<Self> {
        match self.state() {
            Some(SlotState::Free) => {
                Some(Self::with(SlotState::Ready, 0, 0, self.generation().wrapping_add(1)))
            }
            _ => None,
        }
    }

    /// READY to CLAIMED by this worker.
    #[inline(always)]
    pub const fn claimed(self, worker: WorkerIndex) -> Option<Self> {
        if !self.is_ready() || worker.0 >> WORKER_BITS != 0 {
            return None;
        }
        Some(Self::with(SlotState::Claimed, self.attempt(), worker.0, self.generation()))
    }

    /// CLAIMED to DONE: its worker has written a reply, or whoever recovers a dead worker's last
    /// attempt has.
    #[inline(always)]
    pub const fn done(self) -> Option<Self> {
        match self.state() {
            Some(SlotState::Claimed) => Some(Self::with(
                SlotState::Done,
                self.attempt(),
                self.worker().0,
                self.generation(),
            )),
            _ => None,
        }
    }

    /// CLAIMED to READY with the next attempt, for who holds proof that the worker is dead. `None`
    /// where the attempts have no number left.
    pub const fn requeued(self) -> Option<Self> {
        match self.state() {
            Some(SlotState::Claimed) if self.attempt() < ATTEMPT_MAX => {
                Some(Self::with(SlotState::Ready, self.attempt() + 1, 0, self.generation()))
            }
            _ => None,
        }
    }

    /// DONE to FREE, or READY to FREE: the client has collected, or takes its call back.
    #[inline(always)]
    pub const fn freed(self) -> Option<Self> {
        match self.state() {
            Some(SlotState::Done | SlotState::Ready) => {
                Some(Self::with(SlotState::Free, 0, 0, self.generation()))
            }
            _ => None,
        }
    }
}

impl std::fmt::Debug for SlotWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (generation, attempt) = (self.generation(), self.attempt());
        match self.state() {
            Some(SlotState::Free) => write!(f, "FREE({generation})"),
            Some(SlotState::Ready) => write!(f, "READY({generation}, {attempt})"),
            Some(SlotState::Claimed) => {
                write!(f, "CLAIMED({generation}, {attempt}, by {})", self.worker().0)
            }
            Some(SlotState::Done) => {
                write!(f, "DONE({generation}, {attempt}, by {})", self.worker().0)
            }
            None => write!(f, "INVALID({:#x})", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const W: WorkerIndex = WorkerIndex(77);

    #[test]
    fn a_pass_goes_round() {
        let free = SlotWord::UNUSED;
        let ready = free.ready().unwrap();
        assert_eq!(ready.bits(), 1 << 60 | 1);
        let claimed = ready.claimed(W).unwrap();
        assert_eq!(claimed.bits(), 2 << 60 | 77 << 40 | 1);
        let done = claimed.done().unwrap();
        assert_eq!(done.bits(), 3 << 60 | 77 << 40 | 1);
        let free = done.freed().unwrap();
        assert_eq!(free.bits(), 1);
        assert_eq!(format!("{ready:?} {claimed:?}"), "READY(1, 0) CLAIMED(1, 0, by 77)");
    }

    #[test]
    fn a_dead_workers_pass_is_ready_again_with_the_next_attempt() {
        let claimed = SlotWord::UNUSED.ready().unwrap().claimed(W).unwrap();
        let again = claimed.requeued().unwrap();
        assert_eq!(format!("{again:?}"), "READY(1, 1)");
        assert_eq!(again.claimed(W).unwrap().attempt(), 1);
    }

    #[test]
    fn attempts_end() {
        let mut word = SlotWord::UNUSED.ready().unwrap().claimed(W).unwrap();
        for _ in 0..ATTEMPT_MAX {
            word = word.requeued().unwrap().claimed(W).unwrap();
        }
        assert_eq!(word.attempt(), ATTEMPT_MAX);
        assert_eq!(word.requeued(), None);
        assert!(word.done().is_some());
    }

    #[test]
    fn a_generation_goes_round_without_touching_its_neighbours() {
        let last = SlotWord::from_bits(GENERATION_MASK);
        assert_eq!(last.ready().unwrap().bits(), 1 << 60);
    }

    #[test]
    fn a_worker_beyond_the_bits_claims_nothing() {
        let ready = SlotWord::UNUSED.ready().unwrap();
        assert_eq!(ready.claimed(WorkerIndex(1 << 14)), None);
        assert!(ready.claimed(WorkerIndex((1 << 14) - 1)).is_some());
    }

    proptest! {
        /// Every word has exactly the changes that its state allows, and each keeps the generation
        /// but the one that begins it.
        #[test]
        fn only_legal_changes_exist(bits: u64, worker in 0u16..1 << 14) {
            let word = SlotWord::from_bits(bits);
            let legal = [
                word.ready().is_some(),
                word.claimed(WorkerIndex(worker)).is_some(),
                word.done().is_some(),
                word.requeued().is_some(),
                word.freed().is_some(),
            ];
            let tries_left = word.attempt() < ATTEMPT_MAX;
            prop_assert_eq!(legal, match word.state() {
                Some(SlotState::Free) => [true, false, false, false, false],
                Some(SlotState::Ready) => [false, true, false, false, true],
                Some(SlotState::Claimed) => [false, false, true, tries_left, false],
                Some(SlotState::Done) => [false, false, false, false, true],
                None => [false; 5],
            });
            let kept = [word.claimed(WorkerIndex(worker)), word.done(), word.requeued(), word.freed()];
            for next in kept.into_iter().flatten() {
                prop_assert_eq!(next.generation(), word.generation());
                prop_assert!(next.state().is_some());
            }
            if let Some(next) = word.ready() {
                prop_assert_eq!(next.generation(), word.generation().wrapping_add(1) & GENERATION_MASK);
            }
        }
    }
}
