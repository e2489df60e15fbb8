//! The words of a board on the heap, of whatever kind.

use std::sync::atomic::Ordering::Relaxed;

use meshwork_protocol::pass::WorkerIndex;
use meshwork_protocol::pass::atomic::AtomicWord;
use meshwork_protocol::pass::board::{Board, Walker};
use meshwork_protocol::pass::frame::Call;
use meshwork_protocol::pass::ring::{HintRing, Slots};
use meshwork_protocol::pass::slot::SlotWord;

/// Slots without payloads, both rings, the sleepers.
pub(crate) struct Heap<W> {
    pub(crate) words: Vec<W>,
    pub(crate) calls: Vec<W>,
    pub(crate) high: Ring<W>,
    pub(crate) low: Ring<W>,
    pub(crate) sleepers: Vec<W>,
}

/// The words of a hint ring.
pub(crate) struct Ring<W> {
    pub(crate) head: W,
    pub(crate) tail: W,
    pub(crate) cells: Vec<W>,
}

impl<W: AtomicWord> Ring<W> {
    /// An empty ring in which everything before this position has been dequeued.
    fn at(position: u64, cells: usize, word: &impl Fn(u64) -> W) -> Self {
        let cell = |index: usize| {
            let turns = u64::from((index as u64) < position % cells as u64);
            let lap = (position / cells as u64).wrapping_add(turns);
            word(lap << 40)
        };
        Self { head: word(position), tail: word(position), cells: (0..cells).map(cell).collect() }
    }

    fn map<V>(&self, word: &impl Fn(&W) -> V) -> Ring<V> {
        Ring {
            head: word(&self.head),
            tail: word(&self.tail),
            cells: self.cells.iter().map(word).collect(),
        }
    }

    fn hints(&self) -> HintRing<'_, W> {
        HintRing::new(&self.head, &self.tail, &self.cells)
    }
}

impl<W: AtomicWord> Heap<W> {
    /// Free slots, and empty rings that begin at `position`.
    pub(crate) fn new(slots: u32, cells: usize, position: u64, word: impl Fn(u64) -> W) -> Self {
        Self {
            words: (0..slots).map(|_| word(0)).collect(),
            calls: (0..slots).map(|_| word(0)).collect(),
            high: Ring::at(position, cells, &word),
            low: Ring::at(position, cells, &word),
            sleepers: vec![word(0)],
        }
    }

    /// As many words of another kind, made from these.
    pub(crate) fn map<V>(&self, word: impl Fn(&W) -> V) -> Heap<V> {
        Heap {
            words: self.words.iter().map(&word).collect(),
            calls: self.calls.iter().map(&word).collect(),
            high: self.high.map(&word),
            low: self.low.map(&word),
            sleepers: self.sleepers.iter().map(&word).collect(),
        }
    }

    /// The board over them.
    pub(crate) fn board(&self) -> Board<'_, Self> {
        Board {
            slots: self,
            high: self.high.hints(),
            low: self.low.hints(),
            sleepers: &self.sleepers,
        }
    }

    /// Every slot is free, and passes go round the ring as if nothing had happened.
    pub(crate) fn assert_works(&self, call: Call) {
        let mut walker = Walker::default();
        for round in 0..=2 * self.high.cells.len() as u32 {
            let slot = round % self.count();
            self.submit(slot, call);
            let claim = self.board().claim(&mut walker, WorkerIndex(0), |_| true);
            let claim = claim.expect("it is hinted");
            assert_eq!(claim.slot, slot);
            assert!(self.board().complete(claim));
            self.board().collect(slot, self.state(slot)).expect("it is done");
        }
    }

    /// A slot's word.
    pub(crate) fn state(&self, slot: u32) -> SlotWord {
        SlotWord::from_bits(self.word(slot).load(Relaxed))
    }

    /// Writes a call into a free slot and publishes it, as its owner does. The word it has then.
    pub(crate) fn submit(&self, slot: u32, call: Call) -> SlotWord {
        let free = self.state(slot);
        self.call(slot).store(call.to_bits(), Relaxed);
        self.board().publish(slot, free, call.priority, 0).expect("the slot is free");
        free.ready().expect("the slot is free")
    }
}

impl<W: AtomicWord> Slots for Heap<W> {
    type Word = W;

    fn count(&self) -> u32 {
        self.words.len() as u32
    }

    fn word(&self, slot: u32) -> &W {
        &self.words[slot as usize]
    }

    fn call(&self, slot: u32) -> &W {
        &self.calls[slot as usize]
    }
}
