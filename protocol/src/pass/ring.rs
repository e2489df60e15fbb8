//! The hint ring: where workers look for slots that are ready.
//!
//! A cell is `lap:24 | generation:20 | slot + 1:20`; without a slot it is empty. Position `p` of the
//! ring is cell `p mod cells` in lap `p div cells`. A cell that is empty in its position's lap waits
//! for a hint; the hint stays until its slot was claimed, or was found to be stale; then the cell is
//! emptied *into the next lap*.
//!
//! Enqueue: (1) compare-and-set the cell at the tail from empty to the hint, (2) move the tail on.
//! Dequeue: (1) claim the slot, (2) empty the cell, (3) move the head on. Head and tail only say
//! where to begin: whoever finds a cell that is ahead of them moves them, so a process killed between
//! two steps has left nothing to wait for. A hint that is lost with its process, or for which there
//! was no room, is found by looking at the slots.
//!
//! A hint carries the low bits of its slot's generation: one of a pass that was taken back does not
//! stand for the next pass in the same slot, so order holds across cancellation.
//!
//! A worker that lacks a closure walks past its hint, and remembers in a [`Cursor`] of its own how
//! far it has looked. So all closures share a ring, in one order, and none is in another's way.
//!
//! Laps and generations are cut to their low bits, so a process that sleeps between a read and its
//! compare-and-set for exactly a whole number of turns of those bits may misplace or erase a hint.
//! That is a lost hint, and is found as one.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::atomic::AtomicWord;
use super::slot::SlotWord;
use super::{ClosureId, SLOTS_MAX, WorkerIndex};

const SLOT_BITS: u32 = 20;
const GENERATION_BITS: u32 = 20;
const LAP_SHIFT: u32 = SLOT_BITS + GENERATION_BITS;
const LAP_MASK: u64 = (1 << (64 - LAP_SHIFT)) - 1;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

const _: () = assert!((SLOTS_MAX as u64) < 1 << SLOT_BITS);

/// The slots that hints point at.
pub trait Slots {
    /// Their words.
    type Word: AtomicWord;
    /// How many there are.
    fn count(&self) -> u32;
    /// The word of one; `slot` is less than the count.
    fn word(&self, slot: u32) -> &Self::Word;
    /// The description of its call; `slot` is less than the count.
    fn call(&self, slot: u32) -> &Self::Word;
    /// This slot will be looked at soon.
    #[inline(always)]
    fn expect(&self, _slot: u32) {}
}

/// How far a worker has looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(u64);

/// A slot that was claimed, and the word that proves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slot.
    pub slot: u32,
    /// Its word while it is claimed.
    pub word: SlotWord,
}

/// A ring of hints.
#[derive(Debug)]
pub struct HintRing<'m, W> {
    head: &'m W,
    tail: &'m W,
    cells: &'m [W],
    shift: u32,
}

impl<W> Clone for HintRing<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for HintRing<'_, W> {}

#[derive(Clone, Copy)]
struct Cell(u64);

/// Where a cell stands to a position.
enum Standing {
    /// Empty, in the position's lap.
    Open,
    /// Holds the position's hint.
    Hint,
    /// The position was dequeued.
    Past,
    /// The position is not open yet: the hint of a lap before is still there.
    Behind,
}

impl Cell {
    #[inline(always)]
    fn empty(lap: u64) -> Self {
        Self((lap & LAP_MASK) << LAP_SHIFT)
    }

    #[inline(always)]
    fn hint(lap: u64, slot: u32, generation: u64) -> Self {
        let generation = (generation & GENERATION_MASK) << SLOT_BITS;
        Self(Self::empty(lap).0 | generation | u64::from(slot + 1))
    }

    #[inline(always)]
    fn standing(self, lap: u64) -> Standing {
        let ahead = ((self.0 >> LAP_SHIFT).wrapping_sub(lap)) & LAP_MASK;
        if ahead == 0 {
            if self.0 & ((1 << SLOT_BITS) - 1) == 0 { Standing::Open } else { Standing::Hint }
        } else if ahead <= LAP_MASK / 2 {
            Standing::Past
        } else {
            Standing::Behind
        }
    }

    #[inline(always)]
    fn slot(self) -> u32 {
        (self.0 as u32 & ((1 << SLOT_BITS) - 1)).wrapping_sub(1)
    }

    /// Whether a slot with this word is the pass that was hinted, and still waits.
    #[inline(always)]
    fn is_of(self, word: SlotWord) -> bool {
        word.is_ready() && (self.0 >> SLOT_BITS ^ word.generation()) & GENERATION_MASK == 0
    }
}

impl<'m, W: AtomicWord> HintRing<'m, W> {
    /// The ring over these words. `None` unless the number of cells is a power of two.
    pub fn new(head: &'m W, tail: &'m W, cells: &'m [W]) -> Option<Self> {
        let shift = cells.len().trailing_zeros();
        cells.len().is_power_of_two().then_some(Self { head, tail, cells, shift })
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> &'m W {
        &self.cells[position as usize & (self.cells.len() - 1)]
    }

    #[inline(always)]
    fn lap(&self, position: u64) -> u64 {
        position >> self.shift
    }

    /// Leaves a hint at the tail; false when there is no room.
    #[inline]
    pub fn enqueue(&self, slot: u32, generation: u64) -> bool {
        // Each failed try means that another enqueued, or that a tail left behind was helped on.
        // More in a row than there are cells means that the memory holds nonsense.
        for _ in 0..=self.cells.len() {
            let tail = self.tail.load(Acquire);
            let cell = self.cell(tail);
            let lap = self.lap(tail);
            let found = Cell(cell.load(Acquire));
            match found.standing(lap) {
                Standing::Open => {
                    let hint = Cell::hint(lap, slot, generation);
                    // Pair `hint` with the load in `claim`; in the total order with `sleepers`.
                    if cell.compare_exchange(found.0, hint.0, SeqCst, Relaxed).is_ok() {
                        self.advance(self.tail, tail);
                        return true;
                    }
                }
                Standing::Hint | Standing::Past => self.advance(self.tail, tail),
                Standing::Behind => {
                    if self.tail.load(Acquire) == tail {
                        return false;
                    }
                }
            }
        }
        false
    }

    #[inline(always)]
    fn advance(&self, end: &W, from: u64) {
        // Losing means that another has moved it.
        let _ = end.compare_exchange(from, from.wrapping_add(1), Release, Relaxed);
    }

    /// Moves the head on if it stands here.
    #[inline(always)]
    fn pass_by(&self, position: u64, head: &mut u64) {
        if position == *head {
            self.advance(self.head, position);
            *head = position.wrapping_add(1);
        }
    }

    /// Empties a cell whose hint is of no more use, and moves the head on if it stands here.
    #[inline(always)]
    fn retire(&self, position: u64, found: Cell, head: &mut u64) {
        let emptied = Cell::empty(self.lap(position).wrapping_add(1));
        let _ = self.cell(position).compare_exchange(found.0, emptied.0, AcqRel, Relaxed);
        self.pass_by(position, head);
    }

    /// Claims the first hinted slot that `can_run`, from the cursor on.
    #[inline]
    pub fn claim<S: Slots<Word = W>>(
        &self,
        cursor: &mut Cursor,
        slots: &S,
        worker: WorkerIndex,
        mut can_run: impl FnMut(ClosureId) -> bool,
    ) -> Option<Claim> {
        let mut head = self.head.load(Acquire);
        let mut at = cursor.0.max(head);
        if at != head {
            head = self.settle();
        }
        // A walk from the head meets at most a ring of cells, and as many again that others emptied
        // meanwhile; one that is longer is caught up by the next call.
        for _ in 0..2 * self.cells.len() {
            let found = Cell(self.cell(at).load(SeqCst));
            match found.standing(self.lap(at)) {
                Standing::Open | Standing::Behind => break,
                Standing::Past => self.pass_by(at, &mut head),
                Standing::Hint => match self.take(found, slots, worker, &mut can_run) {
                    Taken::Claimed(claim) => {
                        self.retire(at, found, &mut head);
                        let next = Cell(self.cell(at.wrapping_add(1)).load(Relaxed));
                        if next.slot() < slots.count() {
                            slots.expect(next.slot());
                        }
                        *cursor = Cursor(at.wrapping_add(1));
                        return Some(claim);
                    }
                    Taken::Stale => self.retire(at, found, &mut head),
                    Taken::Foreign => {}
                },
            }
            at = at.wrapping_add(1);
        }
        *cursor = Cursor(at);
        None
    }

    #[inline(always)]
    fn take<S: Slots<Word = W>>(
        &self,
        hint: Cell,
        slots: &S,
        worker: WorkerIndex,
        can_run: &mut impl FnMut(ClosureId) -> bool,
    ) -> Taken {
        let slot = hint.slot();
        if slot >= slots.count() {
            return Taken::Stale;
        }
        // Pair `ready` with the store in `Board::publish`: the call is in the slot.
        let word = SlotWord::from_bits(slots.word(slot).load(Acquire));
        if !hint.is_of(word) {
            return Taken::Stale;
        }
        claim_slot(slots, slot, word, worker, can_run)
    }

    /// Moves the head over what was dequeued. Where it stands then.
    ///
    /// A worker that has looked further than the head does not walk over what lies between, and a
    /// head that is left behind for half of all laps seems to be ahead.
    #[cold]
    fn settle(&self) -> u64 {
        let mut head = self.head.load(Acquire);
        for _ in 0..2 * self.cells.len() {
            let found = Cell(self.cell(head).load(Acquire));
            let Standing::Past = found.standing(self.lap(head)) else { break };
            self.advance(self.head, head);
            head = head.wrapping_add(1);
        }
        head
    }

    /// The hint that stands first, taken out, unless that is at this position or later: for who must
    /// make room.
    pub(super) fn pop_before(&self, end: u64) -> Option<(u32, u64)> {
        // Each failed try means that another took that hint.
        for _ in 0..=self.cells.len() {
            let head = self.settle();
            if end.wrapping_sub(head) as i64 <= 0 {
                return None;
            }
            let cell = self.cell(head);
            let found = Cell(cell.load(Acquire));
            match found.standing(self.lap(head)) {
                Standing::Open | Standing::Behind => return None,
                Standing::Past => {}
                Standing::Hint => {
                    let emptied = Cell::empty(self.lap(head).wrapping_add(1));
                    let won = cell.compare_exchange(found.0, emptied.0, AcqRel, Relaxed).is_ok();
                    self.advance(self.head, head);
                    if won {
                        return Some((found.slot(), found.0 >> SLOT_BITS & GENERATION_MASK));
                    }
                }
            }
        }
        None
    }

    /// Where the next hint goes.
    pub(super) fn tail(&self) -> u64 {
        self.tail.load(Acquire)
    }

    /// How many cells there are.
    pub(super) fn cells(&self) -> usize {
        self.cells.len()
    }

    /// Calls `seen` with the slot and the low bits of the generation of every hint in the ring.
    pub(super) fn each_hint(&self, mut seen: impl FnMut(u32, u64)) {
        for cell in self.cells {
            let cell = Cell(cell.load(Acquire));
            if cell.slot() < SLOTS_MAX {
                seen(cell.slot(), cell.0 >> SLOT_BITS & GENERATION_MASK);
            }
        }
    }

    /// Positions between head and tail: hints, and what is left of them.
    pub fn len(&self) -> u64 {
        self.tail.load(Relaxed).saturating_sub(self.head.load(Relaxed))
    }

    /// Whether nothing stands between head and tail.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The part of a generation that a hint carries.
pub(super) fn hinted_generation(word: SlotWord) -> u64 {
    word.generation() & GENERATION_MASK
}

pub(super) enum Taken {
    Claimed(Claim),
    /// Not waiting, or not any more.
    Stale,
    /// Waiting for a worker that has its closure.
    Foreign,
}

/// Claims a slot that was seen ready, for a worker that can run it.
#[inline(always)]
pub(super) fn claim_slot<S: Slots>(
    slots: &S,
    slot: u32,
    ready: SlotWord,
    worker: WorkerIndex,
    can_run: &mut impl FnMut(ClosureId) -> bool,
) -> Taken {
    // Read before the claim, and right if the claim succeeds: a generation that has not changed has
    // had one call only.
    let call = super::frame::Call::from_bits(slots.call(slot).load(Relaxed));
    if !can_run(call.closure) {
        return Taken::Foreign;
    }
    let Some(claimed) = ready.claimed(worker) else { return Taken::Stale };
    let word = slots.word(slot);
    match word.compare_exchange(ready.bits(), claimed.bits(), AcqRel, Relaxed) {
        Ok(_) => Taken::Claimed(Claim { slot, word: claimed }),
        Err(_) => Taken::Stale,
    }
}
