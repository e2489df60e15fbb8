//! The board: all slots with their hint rings and the workers that sleep, and the order of the steps
//! between them.
//!
//! | killed after | what is left | what recovers it |
//! |---|---|---|
//! | writing the call | FREE | nothing was accepted; the next owner of the range uses the slot |
//! | READY | no hint | a worker's scan before it sleeps and at each time-out, or the watchdog's rehint |
//! | the hint | the tail is behind, nobody was woken | the next enqueue moves it; a sleeper's time-out |
//! | taking a hint out of a full ring | a pass without a hint, others out of order | as after READY |
//! | clearing a sleeper's bit | nobody wakes it | its time-out |
//! | CLAIMED | a stale hint | the next worker empties the cell; [`Board::recover`] requeues the slot |
//! | emptying the cell | the head is behind | the next worker moves it |
//! | writing the reply | CLAIMED | [`Board::recover`]: the next attempt overwrites it |
//! | DONE | the client was not told | [`Board::recover`] tells it; its own look at each time-out |
//! | telling the client | nobody was woken | the client's time-out |
//! | collecting | DONE, or FREE | adopted by the client's name, or freed when its time is over |
//! | taking a call back | a stale hint | the next worker, or who needs the room, empties the cell |
//! | requeuing in `recover` | READY, no hint | as after READY |
//! | any other step of `recover` | the rest is as it was | whoever holds the worker's lock next does it again |

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::atomic::AtomicWord;
use super::frame::Call;
use super::ring::{Claim, Cursor, HintRing, Slots, Taken, claim_slot, hinted_generation};
use super::slot::{SlotState, SlotWord};
use super::{ClosureId, PassId, Priority, WorkerIndex};

/// At every so many claims a worker looks at low priority first, so that it is late and not never.
pub const LOW_TURN: u32 = 8;

/// Slots, rings, sleepers.
#[derive(Debug)]
pub struct Board<'m, S: Slots> {
    /// The slots.
    pub slots: &'m S,
    /// Hints of high priority.
    pub high: HintRing<'m, S::Word>,
    /// Hints of low priority.
    pub low: HintRing<'m, S::Word>,
    /// A bit for each worker that sleeps.
    pub sleepers: &'m [S::Word],
}

impl<S: Slots> Clone for Board<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Slots> Copy for Board<'_, S> {}

/// How far one worker has looked in each ring, and whose turn it is.
#[derive(Clone, Debug, Default)]
pub struct Walker {
    high: Cursor,
    low: Cursor,
    turn: u32,
}

impl Walker {
    /// Looks at everything again: the worker can run more than before.
    pub fn rewind(&mut self) {
        (self.high, self.low) = (Cursor::default(), Cursor::default());
    }
}

/// What [`Board::recover`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Passes that will be run again.
    pub requeued: Vec<PassId>,
    /// Passes whose attempts are over.
    pub poisoned: Vec<PassId>,
    /// Replies whose client was perhaps not told.
    pub announced: u32,
}

impl<S: Slots> Board<'_, S> {
    fn ring(&self, priority: Priority) -> &HintRing<'_, S::Word> {
        match priority {
            Priority::High => &self.high,
            Priority::Low => &self.low,
        }
    }

    /// Makes a free slot ready, after its owner has written a call into it, and leaves a hint. Then
    /// [`Board::take_sleeper`].
    ///
    /// `near` is where the client's last hint in this ring went, as this returned it; 0 does too.
    /// `None` if the slot is not free.
    #[inline]
    pub fn publish(&self, slot: u32, free: SlotWord, priority: Priority, near: u64) -> Option<u64> {
        let ready = free.ready()?;
        // Pair `ready` with the loads in `HintRing::take` and `scan`.
        self.slots.word(slot).store(ready.bits(), Release);
        Some(self.hint(slot, ready, priority, near))
    }

    #[inline]
    fn hint(&self, slot: u32, ready: SlotWord, priority: Priority, near: u64) -> u64 {
        match self.ring(priority).enqueue(near, slot, ready.generation()) {
            Some(next) => {
                self.ring(priority).expect_line(self.slots, next);
                next
            }
            None => self.hint_into_full_ring(slot, ready, priority),
        }
    }

    /// Turns the ring once. Hints of passes that were taken back make room; those that are good, and
    /// stand in the way because no worker there can run them, go to the tail in the order in which
    /// they stood. A ring has two cells for a slot, so a turn is paid for by the half of a ring that
    /// it frees.
    #[cold]
    fn hint_into_full_ring(&self, slot: u32, ready: SlotWord, priority: Priority) -> u64 {
        let ring = self.ring(priority);
        let end = ring.tail();
        for _ in 0..ring.cells() {
            let Some((other, generation)) = ring.pop_before(end) else { break };
            if self.waits(other, generation) && ring.enqueue(0, other, generation).is_none() {
                self.show(other);
            }
        }
        match ring.enqueue(0, slot, ready.generation()) {
            Some(next) => next,
            None => {
                self.show(slot);
                0
            }
        }
    }

    fn waits(&self, slot: u32, generation: u64) -> bool {
        slot < self.slots.count() && {
            let word = SlotWord::from_bits(self.slots.word(slot).load(Acquire));
            word.is_ready() && hinted_generation(word) == generation
        }
    }

    /// Without a hint, a worker about to sleep must see the slot's word itself.
    fn show(&self, slot: u32) {
        // In the total order: `sleepers`.
        self.slots.word(slot).fetch_or(0, SeqCst);
    }

    /// A sleeping worker that may be woken for a pass, no longer marked as asleep. Called after
    /// [`Board::publish`]; whoever gets a worker wakes it.
    #[inline]
    pub fn take_sleeper(&self, can_run: impl Fn(WorkerIndex) -> bool) -> Option<WorkerIndex> {
        S::Word::order_after_write();
        for (index, word) in self.sleepers.iter().enumerate() {
            // In the total order: `sleepers`. Whoever marked itself before this load is seen;
            // whoever did later sees the hint.
            let mut asleep = word.load(SeqCst);
            while asleep != 0 {
                let bit = asleep.trailing_zeros();
                let worker = WorkerIndex((index as u32 * 64 + bit) as u16);
                if can_run(worker) && word.fetch_and(!(1 << bit), AcqRel) & 1 << bit != 0 {
                    return Some(worker);
                }
                asleep &= asleep - 1;
            }
        }
        None
    }

    /// Marks this worker as asleep. It must look for work once more before it waits.
    #[inline]
    pub fn fall_asleep(&self, worker: WorkerIndex) {
        if let Some(word) = self.sleepers.get(usize::from(worker.0) / 64) {
            // In the total order: `sleepers`.
            word.fetch_or(1 << (worker.0 % 64), SeqCst);
            S::Word::order_after_write();
        }
    }

    /// Marks this worker as awake. False if it was already: somebody wakes it for a pass. A worker
    /// that found another one before it waited must then pass that on, with [`Board::take_sleeper`],
    /// or the pass waits behind its own while others sleep.
    #[inline]
    pub fn wake_up(&self, worker: WorkerIndex) -> bool {
        let Some(word) = self.sleepers.get(usize::from(worker.0) / 64) else { return false };
        let bit = 1 << (worker.0 % 64);
        word.fetch_and(!bit, AcqRel) & bit != 0
    }

    /// Claims the next hinted pass that the worker can run.
    #[inline]
    pub fn claim(
        &self,
        walker: &mut Walker,
        worker: WorkerIndex,
        can_run: impl Fn(ClosureId) -> bool + Copy,
    ) -> Option<Claim> {
        let (slots, high, low) = (self.slots, &mut walker.high, &mut walker.low);
        let claim = if walker.turn == LOW_TURN - 1 {
            self.low
                .claim(low, slots, worker, can_run)
                .or_else(|| self.high.claim(high, slots, worker, can_run))
        } else {
            self.high
                .claim(high, slots, worker, can_run)
                .or_else(|| self.low.claim(low, slots, worker, can_run))
        };
        if claim.is_some() {
            walker.turn = (walker.turn + 1) % LOW_TURN;
        }
        claim
    }

    /// Claims a pass that the worker can run, if one waits among these slots, hinted or not. A hinted
    /// one comes first, from whichever slot: the scan may have passed its slot before it was
    /// submitted, and have seen a later one.
    pub fn scan(
        &self,
        slots: std::ops::Range<u32>,
        walker: &mut Walker,
        worker: WorkerIndex,
        mut can_run: impl Fn(ClosureId) -> bool + Copy,
    ) -> Option<Claim> {
        for slot in slots.start..slots.end.min(self.slots.count()) {
            // Pair `ready`; in the total order with `sleepers`.
            let word = SlotWord::from_bits(self.slots.word(slot).load(SeqCst));
            let closure = || Call::from_bits(self.slots.call(slot).load(Relaxed)).closure;
            if !word.is_ready() || !can_run(closure()) {
                continue;
            }
            let hinted = self.claim(walker, worker, can_run);
            if hinted.is_some() {
                return hinted;
            }
            if let Taken::Claimed(claim) = claim_slot(self.slots, slot, word, worker, &mut can_run)
            {
                return Some(claim);
            }
        }
        None
    }

    /// The worker has written its reply: the slot is its client's again. False if the claim was no
    /// longer the worker's, which means that it was taken for dead.
    #[inline]
    pub fn complete(&self, claim: Claim) -> bool {
        let Some(done) = claim.word.done() else { return false };
        // Pair `done` with the load in `Board::done`: the reply is in the slot.
        let word = self.slots.word(claim.slot);
        word.compare_exchange(claim.word.bits(), done.bits(), AcqRel, Relaxed).is_ok()
    }

    /// Tells the client that these slots of one word of its range may be done. True if it sleeps,
    /// and is to be woken.
    #[inline]
    pub fn announce(&self, completions: &S::Word, bits: u64, sleeping: &S::Word) -> bool {
        // In the total order: `completions`.
        completions.fetch_or(bits, SeqCst);
        S::Word::order_after_write();
        sleeping.load(SeqCst) != 0
    }

    /// Marks a client as asleep. It must look at its completions once more before it waits.
    #[inline]
    pub fn client_falls_asleep(&self, sleeping: &S::Word) {
        // In the total order: `completions`.
        sleeping.swap(1, SeqCst);
        S::Word::order_after_write();
    }

    /// The slot's word if its pass is done.
    #[inline]
    pub fn done(&self, slot: u32) -> Option<SlotWord> {
        // Pair `done`.
        let word = SlotWord::from_bits(self.slots.word(slot).load(Acquire));
        word.is_done().then_some(word)
    }

    /// The client has read the reply: the slot is free. The word it has now.
    #[inline]
    pub fn collect(&self, slot: u32, done: SlotWord) -> Option<SlotWord> {
        let free = done.freed()?;
        // Only its client writes a word that is done.
        self.slots.word(slot).store(free.bits(), Release);
        Some(free)
    }

    /// Takes a call back that no worker has claimed. The word it has now; `None` if it is too late.
    pub fn take_back(&self, slot: u32, ready: SlotWord) -> Option<SlotWord> {
        if !ready.is_ready() {
            return None;
        }
        let free = ready.freed()?;
        let word = self.slots.word(slot);
        word.compare_exchange(ready.bits(), free.bits(), AcqRel, Relaxed).ok()?;
        Some(free)
    }

    /// Takes from a dead worker what it had claimed. Only for who holds the worker's lock.
    ///
    /// `poison` writes the reply of a pass whose attempts are over; `announce` tells the client of a
    /// slot that is done. May be stopped anywhere and done again; a pass that was made ready and not
    /// hinted when it was stopped is left to [`Board::rehint`].
    pub fn recover(
        &self,
        dead: WorkerIndex,
        mut poison: impl FnMut(u32),
        mut announce: impl FnMut(u32),
    ) -> Recovered {
        self.wake_up(dead);
        let mut recovered = Recovered::default();
        for slot in 0..self.slots.count() {
            let found = SlotWord::from_bits(self.slots.word(slot).load(Acquire));
            if found.worker() != dead {
                continue;
            }
            let pass = PassId { slot, generation: found.generation() };
            match found.state() {
                Some(SlotState::Claimed) => {
                    let call = Call::from_bits(self.slots.call(slot).load(Relaxed));
                    if found.attempt() + 1 < call.attempts
                        && let Some(ready) = found.requeued()
                    {
                        if self.replace(slot, found, ready) {
                            self.hint(slot, ready, call.priority, 0);
                            recovered.requeued.push(pass);
                        }
                    } else if let Some(done) = found.done() {
                        poison(slot);
                        if self.replace(slot, found, done) {
                            announce(slot);
                            recovered.poisoned.push(pass);
                        }
                    }
                }
                Some(SlotState::Done) => {
                    announce(slot);
                    recovered.announced += 1;
                }
                _ => {}
            }
        }
        recovered
    }

    fn replace(&self, slot: u32, found: SlotWord, next: SlotWord) -> bool {
        let word = self.slots.word(slot);
        word.compare_exchange(found.bits(), next.bits(), AcqRel, Relaxed).is_ok()
    }

    /// Leaves a hint for every pass among these slots that waits without one: its client was killed
    /// before it left one, or there was no room. How many there were. A hint that a worker found to be
    /// stale before the pass was requeued, and is about to drop, counts as one: the next rehint sees
    /// to that pass.
    pub fn rehint(&self, slots: impl IntoIterator<Item = u32>) -> u32 {
        let mut waiting: Vec<(u32, SlotWord)> = slots
            .into_iter()
            .filter(|slot| *slot < self.slots.count())
            .map(|slot| (slot, SlotWord::from_bits(self.slots.word(slot).load(Acquire))))
            .filter(|(_, word)| word.is_ready())
            .collect();
        if waiting.is_empty() {
            return 0;
        }
        let mut hinted = std::collections::HashSet::new();
        for ring in [&self.high, &self.low] {
            ring.each_hint(|slot, generation| {
                hinted.insert((slot, generation));
            });
        }
        waiting.retain(|(slot, word)| !hinted.contains(&(*slot, hinted_generation(*word))));
        let mut rehinted = 0;
        for (slot, word) in waiting {
            if self.slots.word(slot).load(Acquire) == word.bits() {
                let call = Call::from_bits(self.slots.call(slot).load(Relaxed));
                self.hint(slot, word, call.priority, 0);
                rehinted += 1;
            }
        }
        rehinted
    }
}
