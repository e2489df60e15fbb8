//! The hint ring: where workers look for slots that are ready.
//!
//! A cell is `lap:24 | generation:20 | slot + 1:20`; without a slot it is empty. Position `p` of the
//! ring is cell `p mod cells` in lap `p div cells`. A cell that is empty in its position's lap waits
//! for a hint; the hint stays until its slot was claimed, or was found to be stale; then the cell is
//! emptied *into the next lap*.
//!
//! Enqueue: (1) compare-and-set the first open cell to the hint, (2) now and then move the tail there.
//! Dequeue: (1) claim the slot, (2) empty the cell, (3) now and then move the head there. Head and
//! tail only say where to begin, and are behind most of the time: the cells tell what was enqueued and
//! dequeued, so a process killed between two steps has left nothing to wait for. A hint that is lost
//! with its process, or for which there was no room, is found by looking at the slots.
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
use super::{ClosureId, WorkerIndex};
use crate::limits::PASS_SLOTS_MAX;

const SLOT_BITS: u32 = 20;
const GENERATION_BITS: u32 = 20;
const LAP_SHIFT: u32 = SLOT_BITS + GENERATION_BITS;
const LAP_MASK: u64 = (1 << (64 - LAP_SHIFT)) - 1;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

const _: () = assert!((PASS_SLOTS_MAX as u64) < 1 << SLOT_BITS);

/// How many positions ahead of a claim the next slot is asked for: a few short calls take as long as
/// a line from another processor.
const AHEAD: u64 = 4;

/// Cells that share a cache line.
const LINE_CELLS: u64 = 8;

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
    /// This word will be changed soon.
    #[inline(always)]
    fn expect_word(&self, _word: &Self::Word) {}
}

/// How far head and tail may be behind before they are moved, in a ring of at least twice as many
/// cells: the cells of one cache line are read in one go.
const BEHIND: u64 = 8;

/// How far a worker has looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The next position.
    at: u64,
    /// From here to there, everything was dequeued.
    clear_from: u64,
}

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
    behind: u64,
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
    /// The ring over these words.
    ///
    /// # Panics
    ///
    /// Unless the number of cells is a power of two.
    #[inline(always)]
    pub fn new(head: &'m W, tail: &'m W, cells: &'m [W]) -> Self {
        assert!(cells.len().is_power_of_two(), "positions are cut to cells by a mask");
        let behind = BEHIND.min(cells.len() as u64 / 2);
        Self { head, tail, cells, shift: cells.len().trailing_zeros(), behind }
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> &'m W {
        &self.cells[position as usize & (self.cells.len() - 1)]
    }

    #[inline(always)]
    fn lap(&self, position: u64) -> u64 {
        position >> self.shift
    }

    /// Leaves a hint in the first open cell, looked for from the tail on, or from `near` if that is
    /// later: the position after one that this client has used. The position after this one; `None`
    /// when there is no room.
    #[inline]
    pub fn enqueue(&self, near: u64, slot: u32, generation: u64) -> Option<u64> {
        let tail = self.tail.load(Acquire);
        let mut at = tail.max(near);
        // Each failed try means that another enqueued. More in a row than there are cells means that
        // the memory holds nonsense.
        for _ in 0..2 * self.cells.len() {
            let cell = self.cell(at);
            let lap = self.lap(at);
            let found = Cell(cell.load(Acquire));
            match found.standing(lap) {
                Standing::Open => {
                    let hint = Cell::hint(lap, slot, generation);
                    // Pair `hint` with the load in `claim`; in the total order with `sleepers`.
                    if cell.compare_exchange(found.0, hint.0, SeqCst, Relaxed).is_ok() {
                        let next = at.wrapping_add(1);
                        self.advance(self.tail, tail, next);
                        return Some(next);
                    }
                }
                Standing::Hint | Standing::Past => at = at.wrapping_add(1),
                Standing::Behind => return None,
            }
        }
        None
    }

    /// After a hint went into the last cell of a line: the line after the next, which a worker wrote
    /// a lap ago.
    #[inline(always)]
    pub(super) fn expect_line<S: Slots<Word = W>>(&self, slots: &S, next: u64) {
        if next.is_multiple_of(LINE_CELLS) {
            slots.expect_word(self.cell(next.wrapping_add(LINE_CELLS)));
        }
    }

    /// Moves an end of the ring, once it is far enough behind.
    #[inline(always)]
    fn advance(&self, end: &W, from: u64, to: u64) {
        if to.wrapping_sub(from) >= self.behind {
            // Losing means that another has moved it.
            let _ = end.compare_exchange(from, to, Release, Relaxed);
        }
    }

    /// Empties a cell whose hint is of no more use.
    #[inline(always)]
    fn empty(&self, position: u64, found: Cell) -> bool {
        let emptied = Cell::empty(self.lap(position).wrapping_add(1));
        let cell = self.cell(position);
        cell.compare_exchange(found.0, emptied.0, AcqRel, Relaxed).is_ok()
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
        let head = self.head.load(Acquire);
        if cursor.at < head {
            *cursor = Cursor { at: head, clear_from: head };
        }
        let mut claimed = None;
        // A walk from the head meets at most a ring of cells, and as many again that others emptied
        // meanwhile; one that is longer is caught up by the next call.
        for _ in 0..2 * self.cells.len() {
            let at = cursor.at;
            let found = Cell(self.cell(at).load(SeqCst));
            match found.standing(self.lap(at)) {
                Standing::Open | Standing::Behind => break,
                Standing::Past => {}
                Standing::Hint => match self.take(found, slots, worker, &mut can_run) {
                    Taken::Claimed(claim) => {
                        self.empty(at, found);
                        let ahead = Cell(self.cell(at.wrapping_add(AHEAD)).load(Relaxed));
                        if ahead.slot() < slots.count() {
                            slots.expect(ahead.slot());
                        }
                        claimed = Some(claim);
                    }
                    Taken::Stale => {
                        self.empty(at, found);
                    }
                    Taken::Foreign => cursor.clear_from = at.wrapping_add(1),
                },
            }
            cursor.at = at.wrapping_add(1);
            if claimed.is_some() {
                break;
            }
        }
        if cursor.clear_from <= head {
            self.advance(self.head, head, cursor.at);
        } else {
            self.settle(head, cursor.at);
        }
        claimed
    }

    /// Moves the head over what was dequeued, for a worker that has looked past something. Else it
    /// would stay there when that is gone, and in the end seem to be ahead.
    #[cold]
    fn settle(&self, head: u64, end: u64) {
        let is_past = |at: &u64| {
            let found = Cell(self.cell(*at).load(Acquire));
            matches!(found.standing(self.lap(*at)), Standing::Past)
        };
        let past = (head..end).take(2 * self.cells.len()).take_while(is_past).count();
        self.advance(self.head, head, head + past as u64);
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

    /// The hint that stands first, taken out, unless that is at this position or later: for who must
    /// make room.
    pub(super) fn pop_before(&self, end: u64) -> Option<(u32, u64)> {
        let head = self.head.load(Acquire);
        let mut at = head;
        for _ in 0..=self.cells.len() {
            if end.wrapping_sub(at) as i64 <= 0 {
                return None;
            }
            let found = Cell(self.cell(at).load(SeqCst));
            let popped = match found.standing(self.lap(at)) {
                Standing::Open | Standing::Behind => return None,
                Standing::Past => false,
                Standing::Hint => self.empty(at, found),
            };
            at = at.wrapping_add(1);
            if popped {
                self.advance(self.head, head, at);
                return Some((found.slot(), found.0 >> SLOT_BITS & GENERATION_MASK));
            }
        }
        None
    }

    /// Where the next hint goes, or a little before.
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
            if cell.slot() < PASS_SLOTS_MAX {
                seen(cell.slot(), cell.0 >> SLOT_BITS & GENERATION_MASK);
            }
        }
    }
}

/// A hint, as it stands in a cell.
pub(super) fn hint_bits(lap: u64, slot: u32, generation: u64) -> u64 {
    Cell::hint(lap, slot, generation).0
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
