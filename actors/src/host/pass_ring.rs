//! The pass memory as typed records, and the bytes of a slot for who owns them.
//!
//! The rules are in [`meshwork_protocol::pass`]; here they meet the memory. The records are atomics
//! ([`super::records`]). Only the bytes of calls and replies are plain memory, and they are reached
//! through three tokens, each of which stands for a state of the slot's word:
//!
//! | token | state | what it may do | why it is alone |
//! |---|---|---|---|
//! | [`FreeSlot`], [`WrittenSlot`] | FREE | write the call | the range's lock is held, and the slot's bit in the range's private bitmap was taken |
//! | [`ClaimedCall`] | CLAIMED | read the call, write the reply | the word was compare-and-set to this worker, whose lock is held |
//! | [`Arrived`] | DONE | read the reply | the range's lock is held, and its one [`Drain`] |
//!
//! It is one file although it is long: that the three are alone is argued across all of it.
#![allow(unsafe_code, reason = "plain bytes in memory that several processes map")]

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::{fmt, io};

use meshwork_protocol::limits::PASS_CLOSURES_MAX;
use meshwork_protocol::pass::board::{Board, Walker};
use meshwork_protocol::pass::frame::{Call, DISOWNED, FrameError, INLINE_BYTES, Reply, Status};
use meshwork_protocol::pass::layout::{Layout, WORD_SLOTS};
use meshwork_protocol::pass::ring::{Claim, HintRing, Slots};
use meshwork_protocol::pass::slot::{SlotState, SlotWord};
use meshwork_protocol::pass::{ClientIndex, ClosureId, PassId, WorkerIndex};

use super::mapped_file::{ByteLock, MappedFile, ProcessMark};
use super::parking::wake;
use super::pass_host::{CLIENT_BYTES, WORKER_BYTES};
pub use super::records::{ClientRow, ClosureRow, HeaderWords, Holder, WorkerRow};
use super::records::{Line, Slot};

/// What holds the memory of a ring.
#[derive(Debug)]
enum Backing {
    Mapped(MappedFile),
    /// One process's own: for tests and tools that look into memory.
    Heap(HeapPages),
}

/// An allocation that is only reached through pointers, as a mapping is.
#[derive(Debug)]
struct HeapPages(NonNull<[HeapPage]>);

impl Drop for HeapPages {
    fn drop(&mut self) {
        // SAFETY: it came from a `Box`, and nobody has it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

#[repr(C, align(4096))]
#[derive(Debug)]
struct HeapPage(UnsafeCell<[u8; 4_096]>);

/// The slots, as the rules see them.
pub struct SlotTable {
    slots: NonNull<Slot>,
    count: u32,
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotTable({})", self.count)
    }
}

impl SlotTable {
    #[inline(always)]
    fn slot(&self, slot: u32) -> &Slot {
        assert!(slot < self.count);
        // SAFETY: the table lies in the mapping, which lives as long as the `PassRing` that has it,
        // is aligned by the layout, and its atomics and cells may be shared.
        unsafe { &*self.slots.as_ptr().add(slot as usize) }
    }

    /// Asks for the slot's lines.
    #[inline(always)]
    fn fetch(&self, slot: u32) {
        let slot = self.slot(slot);
        fetch_line(&slot.word);
        fetch_line(&slot.reply);
    }
}

/// Asks for a line, to be written, so that it comes while something else is done.
#[inline(always)]
fn fetch_line(word: &AtomicU64) {
    // SAFETY: a prefetch reads and writes nothing that a program could see; a processor that does
    // not know this one does nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "prefetchw [{word}]",
            word = in(reg) word,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

impl Slots for SlotTable {
    type Word = AtomicU64;

    fn count(&self) -> u32 {
        self.count
    }

    #[inline(always)]
    fn word(&self, slot: u32) -> &AtomicU64 {
        &self.slot(slot).word
    }

    #[inline(always)]
    fn call(&self, slot: u32) -> &AtomicU64 {
        &self.slot(slot).call
    }

    #[inline(always)]
    fn expect(&self, slot: u32) {
        self.fetch(slot);
    }

    #[inline(always)]
    fn expect_word(&self, word: &AtomicU64) {
        fetch_line(word);
    }
}

/// The pass memory of one directory, in this process.
#[derive(Debug)]
pub struct PassRing {
    table: SlotTable,
    base: NonNull<u8>,
    backing: Backing,
    layout: Layout,
    mark: ProcessMark,
}

// SAFETY: everything that is reached through a shared `PassRing` is atomic, or guarded by a token
// that only one thread can have.
unsafe impl Send for PassRing {}
// SAFETY: as above.
unsafe impl Sync for PassRing {}

impl PassRing {
    /// The ring in a mapped file.
    pub fn mapped(file: MappedFile) -> Self {
        let (layout, mark) = (*file.layout(), file.mark());
        Self::over(Backing::Mapped(file), layout, mark)
    }

    /// A ring in this process's own memory, where every buffer has memory from the start. What reads
    /// or writes outside of it is outside of an allocation, which checkers of memory see.
    pub fn on_heap(layout: Layout) -> Self {
        let pages = layout.file_bytes / size_of::<HeapPage>();
        let pages: Box<[HeapPage]> =
            (0..pages).map(|_| HeapPage(UnsafeCell::new([0; 4_096]))).collect();
        // SAFETY: a `Box` does not begin at null.
        let pages = unsafe { NonNull::new_unchecked(Box::into_raw(pages)) };
        Self::over(Backing::Heap(HeapPages(pages)), layout, ProcessMark::here())
    }

    fn over(backing: Backing, layout: Layout, mark: ProcessMark) -> Self {
        let base = Self::base_of(&backing);
        // SAFETY: neither a mapping nor an allocation begins at null; the layout of a backing lies
        // within it, and its slots are aligned to a line.
        let (base, slots) = unsafe {
            let base = NonNull::new_unchecked(base);
            (base, base.add(layout.slots).cast())
        };
        let table = SlotTable { slots, count: layout.slot_count() };
        Self { table, base, backing, layout, mark }
    }

    fn base_of(backing: &Backing) -> *mut u8 {
        match backing {
            Backing::Mapped(file) => file.base(),
            Backing::Heap(pages) => pages.0.as_ptr().cast(),
        }
    }

    /// A record, or records, at an offset of the layout.
    #[inline(always)]
    fn at<T>(&self, offset: usize) -> *mut T {
        debug_assert!(offset + size_of::<T>() <= self.layout.file_bytes);
        // SAFETY: callers pass offsets of the layout, which lies within the backing.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The file, if it is one.
    pub fn file(&self) -> Option<&MappedFile> {
        match &self.backing {
            Backing::Mapped(file) => Some(file),
            Backing::Heap(_) => None,
        }
    }

    /// Whether this process may use it: a forked child has no mapping.
    #[inline(always)]
    pub fn is_here(&self) -> bool {
        self.mark.is_here()
    }

    /// The words of the header that change.
    pub fn header(&self) -> &HeaderWords {
        self.assert_here();
        // SAFETY: the header lies at the start, and is all atomics.
        unsafe { &*self.at(0) }
    }

    /// A child that touched what is not mapped would die of it without a word.
    #[inline(always)]
    fn assert_here(&self) {
        assert!(self.is_here(), "passes cannot be used in a child of a fork: open them there anew");
    }

    /// The workers' rows.
    #[inline]
    pub fn workers(&self) -> &[WorkerRow] {
        self.assert_here();
        // SAFETY: the rows lie here by the layout, and are all atomics.
        unsafe {
            let rows = self.at(self.layout.workers);
            std::slice::from_raw_parts(rows, self.layout.geometry.workers as usize)
        }
    }

    /// A worker's row.
    #[inline]
    pub fn worker(&self, index: WorkerIndex) -> &WorkerRow {
        &self.workers()[usize::from(index.0)]
    }

    /// The clients' rows.
    #[inline]
    pub fn clients(&self) -> &[ClientRow] {
        self.assert_here();
        // SAFETY: the rows lie here by the layout, and are all atomics.
        unsafe {
            let rows = self.at(self.layout.clients);
            std::slice::from_raw_parts(rows, self.layout.geometry.clients as usize)
        }
    }

    /// A client's row.
    #[inline]
    pub fn client(&self, index: ClientIndex) -> &ClientRow {
        &self.clients()[usize::from(index.0)]
    }

    /// The closures' rows.
    pub fn closures(&self) -> &[ClosureRow] {
        self.assert_here();
        // SAFETY: the rows lie here by the layout, and are all atomics.
        unsafe { std::slice::from_raw_parts(self.at(self.layout.closures), PASS_CLOSURES_MAX) }
    }

    /// The heartbeat table: the workers' beats, then the clients'.
    pub fn beats(&self) -> &[AtomicU64] {
        self.assert_here();
        let rows = self.layout.geometry.workers + self.layout.geometry.clients;
        // SAFETY: the words lie here by the layout.
        unsafe { std::slice::from_raw_parts(self.at(self.layout.beats), rows as usize) }
    }

    /// The slots of a client.
    pub fn range(&self, client: ClientIndex) -> std::ops::Range<u32> {
        let each = self.layout.geometry.slots_per_client;
        let first = u32::from(client.0) * each;
        first..first + each
    }

    #[inline(always)]
    fn completions(&self, slot: u32) -> &AtomicU64 {
        self.assert_here();
        // SAFETY: a line for each 64 slots lies here by the layout; `slot` is one of them.
        let line: &Line = unsafe {
            assert!(slot < self.table.count);
            &*self.at::<Line>(self.layout.completions).add((slot / WORD_SLOTS) as usize)
        };
        &line.0
    }

    /// The word of a slot.
    pub fn word(&self, slot: u32) -> SlotWord {
        self.assert_here();
        SlotWord::from_bits(self.table.word(slot).load(Acquire))
    }

    /// The call in a slot, as it is described there.
    pub fn call(&self, slot: u32) -> Call {
        self.assert_here();
        Call::from_bits(self.table.call(slot).load(Relaxed))
    }

    /// Marks a worker as asleep: see [`Board::fall_asleep`].
    pub fn fall_asleep(&self, worker: WorkerIndex) {
        self.board().fall_asleep(worker);
    }

    /// Marks a worker as awake: see [`Board::wake_up`].
    pub fn wake_up(&self, worker: WorkerIndex) -> bool {
        self.board().wake_up(worker)
    }

    /// The rules, over this memory. Whoever has it can break what the tokens stand for.
    #[inline(always)]
    pub(super) fn board(&self) -> Board<'_, SlotTable> {
        self.assert_here();
        // SAFETY: a bit for each worker lies here by the layout.
        let sleepers = unsafe {
            let words = self.layout.geometry.workers as usize / 64;
            std::slice::from_raw_parts(self.at(self.layout.sleepers), words)
        };
        Board { slots: &self.table, high: self.hints(0), low: self.hints(1), sleepers }
    }

    #[inline(always)]
    fn hints(&self, index: usize) -> HintRing<'_, AtomicU64> {
        let cells = self.layout.ring_cells as usize;
        // SAFETY: heads, tails and cells of two rings lie here by the layout.
        let (ends, cells) = unsafe {
            let ends: *const Line = self.at::<Line>(self.layout.rings).add(2 * index);
            let first: *const AtomicU64 =
                self.at::<AtomicU64>(self.layout.cells).add(index * cells);
            (std::slice::from_raw_parts(ends, 2), std::slice::from_raw_parts(first, cells))
        };
        HintRing::new(&ends[1].0, &ends[0].0, cells)
    }

    /// Which client a slot belongs to.
    #[inline(always)]
    pub fn client_of(&self, slot: u32) -> ClientIndex {
        ClientIndex((slot >> self.layout.geometry.slots_per_client.trailing_zeros()) as u16)
    }

    /// Tells a slot's client that it may be done, and wakes it if it sleeps.
    #[inline]
    pub fn tell_client(&self, slot: u32) {
        let row = self.client(self.client_of(slot));
        if self.board().announce(self.completions(slot), 1 << (slot % WORD_SLOTS), &row.sleeping) {
            wake_client(row);
        }
    }

    /// Wakes a sleeping worker that may be woken, if there is one. Whether there was.
    #[inline]
    pub fn wake_worker(&self, can_run: impl Fn(WorkerIndex) -> bool) -> bool {
        match self.board().take_sleeper(can_run) {
            Some(worker) => {
                wake(&self.worker(worker).wake);
                true
            }
            None => false,
        }
    }

    /// The rows of closures in the order in which an id looks for its own.
    fn probe(&self, id: ClosureId) -> impl Iterator<Item = (u16, &ClosureRow)> {
        let begin = id.0 as usize % PASS_CLOSURES_MAX;
        let rows = self.closures().iter().enumerate();
        let (later, first) = (rows.clone().skip(begin), rows.take(begin));
        later.chain(first).map(|(index, row)| (index as u16, row))
    }

    /// The row of a closure, made if there is none. `None` when all rows are taken.
    pub fn closure_row(&self, id: ClosureId, name: &str) -> Option<u16> {
        let wanted = 1 << 32 | u64::from(id.0);
        self.probe(id).find_map(|(index, row)| {
            let found = match row.id.compare_exchange(0, wanted, AcqRel, Acquire) {
                Ok(_) => wanted,
                Err(found) => found,
            };
            (found == wanted).then(|| {
                // Whoever took the row may have been killed before it wrote the name.
                if !name.is_empty() && row.name.bytes.load(Acquire) == 0 {
                    row.name.write(name);
                }
                index
            })
        })
    }

    /// The row of a closure that some worker has registered.
    pub fn find_closure(&self, id: ClosureId) -> Option<u16> {
        let wanted = 1 << 32 | u64::from(id.0);
        let is_end = |found: u64| found == 0 || found == wanted;
        let mut rows = self.probe(id).map(|(index, row)| (index, row.id.load(Acquire)));
        let (index, found) = rows.find(|(_, found)| is_end(*found))?;
        (found == wanted).then_some(index)
    }

    /// Marks all that is in a client's slots as nobody's: its range is taken by a client of another
    /// name. Only with its lock.
    pub(super) fn disown(&self, client: ClientIndex) {
        for slot in self.range(client) {
            let word = SlotWord::from_bits(self.table.word(slot).load(Acquire));
            if word.state() != Some(SlotState::Free) {
                self.table.call(slot).fetch_or(DISOWNED, AcqRel);
            }
        }
    }

    /// Recovers a dead worker. Only with its lock.
    pub(super) fn recover_worker(
        &self,
        dead: WorkerIndex,
        _proof: &ByteLock,
    ) -> meshwork_protocol::pass::board::Recovered {
        let poison = |slot: u32| {
            let reply = Reply { status: Status::Poisoned, bytes: 0, cut: false };
            self.table.slot(slot).reply.store(reply.to_bits(), Relaxed);
        };
        self.board().recover(dead, poison, |slot| self.tell_client(slot))
    }

    #[inline(always)]
    fn buffer(
        &self,
        slot: u32,
        inline: &UnsafeCell<[u8; INLINE_BYTES]>,
        bytes: usize,
        offset: fn(&Layout, u32) -> usize,
    ) -> *mut u8 {
        debug_assert!(slot < self.table.count);
        if bytes <= INLINE_BYTES {
            inline.get().cast()
        } else {
            self.at(offset(&self.layout, slot))
        }
    }
}

/// The lowest `count` ones of some bits.
fn lowest(bits: u64, count: u32) -> u64 {
    let mut rest = bits;
    for _ in 0..count.min(bits.count_ones()) {
        rest &= rest - 1;
    }
    bits & !rest
}

/// Where the ones of some bits stand.
fn ones(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = bits.trailing_zeros();
        (bits != 0).then(|| {
            bits &= bits - 1;
            bit
        })
    })
}

#[cold]
fn wake_client(row: &ClientRow) {
    if row.sleeping.swap(0, AcqRel) != 0 {
        wake(&row.wake);
    }
}

/// A client's range of slots, with its lock.
#[derive(Debug)]
pub struct SlotRange {
    ring: Arc<PassRing>,
    client: ClientIndex,
    first: u32,
    /// A bit for each slot that is free and nobody's.
    free: Box<[AtomicU64]>,
    /// How many slots, from the first, have memory behind their buffers of each kind.
    committed: [AtomicU32; 2],
    /// Where the last hint of each priority went.
    near: [AtomicU64; 2],
    /// A bit for each reply that was found and left.
    left: Box<[AtomicU64]>,
    /// A bit for each slot that holds a pass of another client, which is dead.
    inherited: Box<[AtomicU64]>,
    /// A bit for each free slot that is kept from being used.
    held: Box<[AtomicU64]>,
    drain: Mutex<()>,
    _lock: ByteLock,
}

/// The two buffers of a slot.
#[derive(Clone, Copy)]
enum Buffers {
    Results,
    Arguments,
}

impl Buffers {
    fn of(self, layout: &Layout, slot: u32) -> usize {
        match self {
            Self::Results => layout.result_buffer(slot),
            Self::Arguments => layout.argument_buffer(slot),
        }
    }
}

/// A free slot, to be written.
#[derive(Debug)]
pub struct FreeSlot<'r> {
    range: &'r SlotRange,
    slot: u32,
    free: SlotWord,
}

/// What is written into a slot.
#[derive(Clone, Copy, Debug)]
pub struct NewCall<'a> {
    /// Its description.
    pub call: Call,
    /// At most a payload of the layout.
    pub arguments: &'a [u8],
    /// The client's own mark.
    pub tag: u64,
    /// How long one run may take, in microseconds; counts where the call is timed.
    pub deadline_us: u64,
}

/// A free slot with a call in it.
#[derive(Debug)]
pub struct WrittenSlot<'r>(FreeSlot<'r>);

/// The one who collects from a range at a time.
#[derive(Debug)]
pub struct Drain<'r> {
    range: &'r SlotRange,
    _guard: MutexGuard<'r, ()>,
}

/// A reply, where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// Of which pass.
    pub pass: PassId,
    /// What its client had put with it.
    pub tag: u64,
    /// Which run it was, from zero.
    pub attempt: u8,
    /// How it ended; `Err` if the slot holds nonsense.
    pub reply: Result<Reply, FrameError>,
    /// The reply's bytes.
    pub bytes: &'a [u8],
}

impl SlotRange {
    /// The range of a client whose lock is held. Slots that are free in it can be used; of those that
    /// are not, the replies are collected as one's own, but for those that were disowned: they are
    /// dropped and counted.
    pub(super) fn new(ring: Arc<PassRing>, client: ClientIndex, lock: ByteLock) -> Self {
        assert!(lock.is_of(CLIENT_BYTES + u64::from(client.0)), "the lock of another row");
        let slots = ring.range(client);
        let words = (slots.len() as u32 / WORD_SLOTS) as usize;
        let bits = || (0..words).map(|_| AtomicU64::new(0)).collect();
        let committed = [AtomicU32::new(0), AtomicU32::new(0)];
        let first = slots.start;
        let range = Self {
            ring,
            client,
            first,
            free: bits(),
            committed,
            near: [AtomicU64::new(0), AtomicU64::new(0)],
            left: bits(),
            inherited: bits(),
            held: bits(),
            drain: Mutex::new(()),
            _lock: lock,
        };
        for slot in slots {
            if range.word(slot).state() == Some(SlotState::Free) {
                range.give_back(slot);
            } else if range.ring.table.call(slot).load(Relaxed) & DISOWNED != 0 {
                let (index, bit) = range.place(slot);
                range.inherited[index].fetch_or(bit, AcqRel);
            }
        }
        range.find_unannounced();
        range
    }

    /// The memory.
    pub fn ring(&self) -> &PassRing {
        &self.ring
    }

    /// Whose it is.
    pub fn client(&self) -> ClientIndex {
        self.client
    }

    /// A slot's word.
    #[inline(always)]
    pub fn word(&self, slot: u32) -> SlotWord {
        SlotWord::from_bits(self.ring.table.word(slot).load(Acquire))
    }

    /// Where a slot's bit is.
    #[inline(always)]
    fn place(&self, slot: u32) -> (usize, u64) {
        let index = slot - self.first;
        ((index / WORD_SLOTS) as usize, 1 << (index % WORD_SLOTS))
    }

    #[inline(always)]
    fn give_back(&self, slot: u32) {
        let (index, bit) = self.place(slot);
        self.free[index].fetch_or(bit, AcqRel);
    }

    /// Whether a slot holds a pass of another client, which is dead.
    pub fn is_inherited(&self, slot: u32) -> bool {
        let (index, bit) = self.place(slot);
        self.inherited[index].load(Relaxed) & bit != 0
    }

    #[cold]
    fn drop_inherited(&self, slot: u32) {
        let (index, bit) = self.place(slot);
        self.inherited[index].fetch_and(!bit, AcqRel);
        self.ring.header().orphaned.fetch_add(1, AcqRel);
    }

    /// A free slot; `None` while all are in use.
    #[inline]
    pub fn reserve(&self) -> Option<FreeSlot<'_>> {
        self.ring.assert_here();
        for (index, word) in self.free.iter().enumerate() {
            let mut bits = word.load(Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                let before = word.fetch_and(!(1 << bit), AcqRel);
                if before & 1 << bit != 0 {
                    let slot = self.first + index as u32 * WORD_SLOTS + bit;
                    return Some(FreeSlot { range: self, slot, free: self.word(slot) });
                }
                bits = before & !(1 << bit);
            }
        }
        None
    }

    /// So many free slots; `None` while there are fewer.
    pub fn reserve_all(&self, count: usize) -> Option<Vec<FreeSlot<'_>>> {
        self.ring.assert_here();
        // So that others do not find all taken by one who gives them back.
        if (self.room() as usize) < count {
            return None;
        }
        let mut slots = Vec::with_capacity(count);
        for (index, word) in self.free.iter().enumerate() {
            let mut bits = word.load(Relaxed);
            while bits != 0 && slots.len() < count {
                let wanted = lowest(bits, (count - slots.len()) as u32);
                let before = word.fetch_and(!wanted, AcqRel);
                let first = self.first + index as u32 * WORD_SLOTS;
                slots.extend(ones(before & wanted).map(|bit| {
                    let slot = first + bit;
                    FreeSlot { range: self, slot, free: self.word(slot) }
                }));
                bits = before & !wanted;
            }
        }
        // Fewer are given back as they are dropped.
        (slots.len() == count).then_some(slots)
    }

    /// Slots that could be reserved now.
    pub fn room(&self) -> u32 {
        self.free.iter().map(|word| word.load(Relaxed).count_ones()).sum()
    }

    /// Puts memory behind a buffer of a slot.
    #[inline(always)]
    fn commit(&self, kind: Buffers, slot: u32) -> io::Result<()> {
        if slot - self.first < self.committed[kind as usize].load(Acquire) {
            return Ok(());
        }
        self.commit_slowly(kind, slot)
    }

    #[cold]
    fn commit_slowly(&self, kind: Buffers, slot: u32) -> io::Result<()> {
        let layout = self.ring.layout();
        let each = layout.geometry.payload_bytes as usize;
        let count = self.free.len() as u32 * WORD_SLOTS;
        let begin = kind.of(layout, self.first);
        let mut committed = count;
        if let Some(file) = self.ring.file()
            && each > 0
        {
            let from = kind.of(layout, self.first + self.committed[kind as usize].load(Acquire));
            let to = kind.of(layout, slot) + each;
            if to <= from {
                // Another thread has done it meanwhile.
                return Ok(());
            }
            let end = file.commit(from, to - from, begin + count as usize * each)?;
            committed = ((end - begin) / each) as u32;
        }
        self.committed[kind as usize].fetch_max(committed, AcqRel);
        Ok(())
    }

    /// Takes back a call that no worker has claimed: its tag, and its slot. `None` if it is too late.
    pub fn take_back(&self, pass: PassId) -> Option<(u64, FreeSlot<'_>)> {
        if !self.ring.range(self.client).contains(&pass.slot) {
            return None;
        }
        let word = self.word(pass.slot);
        let tag = self.ring.table.slot(pass.slot).tag.load(Relaxed);
        if word.generation() != pass.generation {
            return None;
        }
        let free = self.ring.board().take_back(pass.slot, word)?;
        let slot = FreeSlot { range: self, slot: pass.slot, free };
        let is_inherited = self.is_inherited(pass.slot);
        if is_inherited {
            self.drop_inherited(pass.slot);
        }
        (!is_inherited).then_some((tag, slot))
    }

    /// Keeps a free slot from being used, until [`release`](Self::release).
    pub fn hold(&self, slot: FreeSlot<'_>) {
        assert!(std::ptr::eq(slot.range, self), "a slot of another range");
        let (index, bit) = self.place(slot.slot);
        self.held[index].fetch_or(bit, AcqRel);
        std::mem::forget(slot);
    }

    /// Lets a slot be used that was held.
    pub fn release(&self, slot: u32) {
        let (index, bit) = self.place(slot);
        if self.held[index].fetch_and(!bit, AcqRel) & bit != 0 {
            self.give_back(slot);
        }
    }

    /// Slots that hold a reply to this client.
    pub fn done(&self) -> impl Iterator<Item = u32> + '_ {
        let own = |slot: &u32| self.word(*slot).is_done() && !self.is_inherited(*slot);
        self.ring.range(self.client).filter(own)
    }

    /// Whether nothing is in any slot.
    pub fn is_all_free(&self) -> bool {
        self.ring.range(self.client).all(|slot| self.word(slot).state() == Some(SlotState::Free))
    }

    /// Slots whose call waits, and how often it was begun.
    pub fn waiting(&self) -> impl Iterator<Item = (PassId, ClosureId, u8)> + '_ {
        self.ring.range(self.client).filter_map(|slot| {
            let word = self.word(slot);
            let call = Call::from_bits(self.ring.table.call(slot).load(Relaxed));
            let pass = PassId { slot, generation: word.generation() };
            word.is_ready().then_some((pass, call.closure, word.attempt()))
        })
    }

    /// Slots whose call waits, and has this tag.
    pub fn tagged(&self, tag: u64) -> impl Iterator<Item = PassId> + '_ {
        let has_tag = move |pass: &PassId| self.ring.table.slot(pass.slot).tag.load(Relaxed) == tag;
        self.waiting().map(|(pass, ..)| pass).filter(has_tag)
    }

    /// The right to collect; `None` while another thread has it.
    pub fn drain(&self) -> Option<Drain<'_>> {
        self.ring.assert_here();
        match self.drain.try_lock() {
            Ok(guard) => Some(Drain { range: self, _guard: guard }),
            Err(TryLockError::Poisoned(poisoned)) => {
                Some(Drain { range: self, _guard: PoisonError::into_inner(poisoned) })
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether any slot may be done.
    #[inline]
    pub fn has_news(&self) -> bool {
        let range = self.ring.range(self.client);
        range.step_by(WORD_SLOTS as usize).any(|slot| self.ring.completions(slot).load(SeqCst) != 0)
    }

    /// Whether any reply was left by who did not want it.
    pub fn has_left(&self) -> bool {
        self.left.iter().any(|word| word.load(Relaxed) != 0)
    }

    /// Slots that are done though nobody said so: found by looking at each.
    pub fn find_unannounced(&self) {
        for slot in self.ring.range(self.client) {
            if self.word(slot).is_done() {
                self.ring.completions(slot).fetch_or(1 << (slot % WORD_SLOTS), AcqRel);
            }
        }
    }
}

impl<'s> FreeSlot<'s> {
    /// The pass that it will hold.
    #[inline(always)]
    pub fn pass(&self) -> PassId {
        let next = self.free.ready().map_or(0, SlotWord::generation);
        PassId { slot: self.slot, generation: next }
    }

    /// Puts memory behind what a call with so many bytes of arguments needs: also behind the result's
    /// place, for a worker must not find that there is no room for what it has made.
    #[inline]
    fn make_room(&self, arguments: usize) -> io::Result<()> {
        self.range.commit(Buffers::Results, self.slot)?;
        if arguments > INLINE_BYTES {
            self.range.commit(Buffers::Arguments, self.slot)?;
        }
        Ok(())
    }

    /// Writes a call, so that publishing it cannot fail.
    ///
    /// # Errors
    ///
    /// There is no memory for the slot's buffers.
    #[inline(always)]
    pub fn write(mut self, new: &NewCall<'_>) -> io::Result<WrittenSlot<'s>> {
        self.fill(new)?;
        Ok(WrittenSlot(self))
    }

    /// The same in several slots: all, or none.
    ///
    /// # Errors
    ///
    /// There is no memory for the slots' buffers.
    pub fn write_all<'a>(
        mut slots: Vec<Self>,
        new: impl Iterator<Item = NewCall<'a>>,
    ) -> io::Result<Vec<WrittenSlot<'s>>> {
        for (slot, new) in slots.iter_mut().zip(new) {
            slot.fill(&new)?;
        }
        Ok(slots.into_iter().map(WrittenSlot).collect())
    }

    #[inline(always)]
    fn fill(&mut self, new: &NewCall<'_>) -> io::Result<()> {
        let NewCall { call, arguments, tag, deadline_us } = *new;
        let (ring, layout) = (&*self.range.ring, self.range.ring.layout());
        self.make_room(arguments.len())?;
        assert!(arguments.len() <= INLINE_BYTES.max(layout.geometry.payload_bytes as usize));
        let slot = ring.table.slot(self.slot);
        slot.call.store(call.to_bits(), Relaxed);
        slot.tag.store(tag, Relaxed);
        if call.timed {
            slot.deadline_us.store(deadline_us, Relaxed);
        }
        let buffer =
            ring.buffer(self.slot, &slot.arguments, arguments.len(), Layout::argument_buffer);
        // SAFETY: the slot is FREE and this token is alone with it (see the table above), so nobody
        // else touches its bytes; the buffer has room for as many, checked above.
        unsafe { buffer.copy_from_nonoverlapping(arguments.as_ptr(), arguments.len()) };
        Ok(())
    }
}

impl WrittenSlot<'_> {
    /// The pass that it will hold.
    #[inline(always)]
    pub fn pass(&self) -> PassId {
        self.0.pass()
    }

    /// What was written.
    #[inline(always)]
    pub fn call(&self) -> Call {
        self.0.range.ring.assert_here();
        Call::from_bits(self.0.range.ring.table.call(self.0.slot).load(Relaxed))
    }

    /// Makes the call ready. Then a worker is to be woken.
    #[inline(always)]
    pub fn publish(self) -> PassId {
        let (pass, priority) = (self.pass(), self.call().priority);
        let FreeSlot { range, slot, free } = self.0;
        let near = &range.near[priority as usize];
        let next = range.ring.board().publish(slot, free, priority, near.load(Relaxed));
        near.store(next.expect("a free slot"), Relaxed);
        std::mem::forget(self.0);
        pass
    }
}

impl Drop for FreeSlot<'_> {
    fn drop(&mut self) {
        self.range.give_back(self.slot);
    }
}

impl Drain<'_> {
    /// Hands every reply that is there to `each`, which says whether it has taken it: one that is
    /// left stays, and is handed out again to who asks for `left` ones too. How many were taken.
    #[inline]
    pub fn collect(&mut self, left: bool, mut each: impl FnMut(Arrived<'_>) -> bool) -> usize {
        let range = self.range;
        let mut collected = 0;
        for index in 0..range.free.len() {
            let first = range.first + index as u32 * WORD_SLOTS;
            let completions = range.ring.completions(first);
            let mut bits = 0;
            if completions.load(Relaxed) != 0 {
                bits = completions.swap(0, AcqRel);
            }
            if left && range.left[index].load(Relaxed) != 0 {
                bits |= range.left[index].swap(0, AcqRel);
            }
            let mut coming = bits;
            while coming != 0 {
                range.ring.table.fetch(first + coming.trailing_zeros());
                coming &= coming - 1;
            }
            let inherited = range.inherited[index].load(Relaxed);
            let mut word = Collecting { range, index, coming: bits, freed: 0, kept: 0 };
            while word.coming != 0 {
                let bit = word.coming.trailing_zeros();
                let slot = first + bit;
                if inherited & 1 << bit != 0 {
                    if let Collected::Taken = self.collect_slot(slot, &mut |_| true) {
                        range.drop_inherited(slot);
                        word.freed |= 1 << bit;
                    }
                } else {
                    match self.collect_slot(slot, &mut each) {
                        Collected::Nothing => {}
                        Collected::Taken => {
                            word.freed |= 1 << bit;
                            collected += 1;
                        }
                        Collected::Left => word.kept |= 1 << bit,
                    }
                }
                word.coming &= word.coming - 1;
            }
        }
        if collected > 0 {
            let counter = range.ring.client(range.client).collected();
            counter.store(counter.load(Relaxed) + collected as u64, Relaxed);
        }
        collected
    }

    #[inline(always)]
    fn collect_slot(&self, index: u32, each: &mut impl FnMut(Arrived<'_>) -> bool) -> Collected {
        let ring = &*self.range.ring;
        let Some(done) = ring.board().done(index) else { return Collected::Nothing };
        let slot = ring.table.slot(index);
        let reply = Reply::from_bits(slot.reply.load(Relaxed), ring.layout.geometry.payload_bytes);
        let bytes = reply.map_or(0, |reply| reply.bytes as usize);
        let buffer = ring.buffer(index, &slot.result, bytes, Layout::result_buffer);
        let arrived = Arrived {
            pass: PassId { slot: index, generation: done.generation() },
            tag: slot.tag.load(Relaxed),
            attempt: done.attempt(),
            reply,
            // SAFETY: the slot is DONE, so only its client, which is this one, touches its bytes, and
            // of its threads only the one with the `Drain`; the length was checked by `from_bits`.
            bytes: unsafe { std::slice::from_raw_parts(buffer, bytes) },
        };
        if !each(arrived) {
            return Collected::Left;
        }
        ring.board().collect(index, done);
        Collected::Taken
    }
}

/// What became of the slots of one word, also where whoever took the replies panics.
struct Collecting<'r> {
    range: &'r SlotRange,
    index: usize,
    /// Not looked at yet.
    coming: u64,
    freed: u64,
    kept: u64,
}

impl Drop for Collecting<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let kept = self.kept | self.coming;
        if kept != 0 {
            self.range.left[self.index].fetch_or(kept, AcqRel);
        }
        if self.freed != 0 {
            self.range.free[self.index].fetch_or(self.freed, AcqRel);
        }
    }
}

enum Collected {
    /// It was not done.
    Nothing,
    Taken,
    Left,
}

/// A worker's place, with its lock.
#[derive(Debug)]
pub struct WorkerSeat {
    ring: Arc<PassRing>,
    index: WorkerIndex,
    walker: Walker,
    _lock: ByteLock,
}

/// A call that was claimed, to be run.
#[derive(Debug)]
pub struct ClaimedCall<'s> {
    ring: &'s PassRing,
    claim: Claim,
    call: Result<Call, FrameError>,
}

/// Where the reply to a call is written.
#[derive(Debug)]
pub struct ReplyWriter<'c> {
    ring: &'c PassRing,
    slot: u32,
    /// Bytes that were offered; more than the payload where they did not fit.
    offered: u64,
}

impl WorkerSeat {
    /// The seat of a worker whose lock is held, and whose predecessor was recovered.
    pub(super) fn new(ring: Arc<PassRing>, index: WorkerIndex, lock: ByteLock) -> Self {
        assert!(lock.is_of(WORKER_BYTES + u64::from(index.0)), "the lock of another row");
        Self { ring, index, walker: Walker::default(), _lock: lock }
    }

    /// The memory.
    pub fn ring(&self) -> &PassRing {
        &self.ring
    }

    /// Which worker.
    pub fn index(&self) -> WorkerIndex {
        self.index
    }

    /// Its row.
    #[inline(always)]
    pub fn row(&self) -> &WorkerRow {
        self.ring.worker(self.index)
    }

    /// Looks at everything anew: it can run more than before.
    pub fn rewind(&mut self) {
        self.walker.rewind();
    }

    /// Claims the next hinted call that it can run.
    #[inline]
    pub fn claim(&mut self, can_run: impl Fn(ClosureId) -> bool + Copy) -> Option<ClaimedCall<'_>> {
        let claim = self.ring.board().claim(&mut self.walker, self.index, can_run)?;
        Some(ClaimedCall::new(&self.ring, claim))
    }

    /// Claims a call that it can run among all slots, hinted or not.
    pub fn scan(&mut self, can_run: impl Fn(ClosureId) -> bool + Copy) -> Option<ClaimedCall<'_>> {
        for index in 0..self.ring.layout().geometry.clients as u16 {
            let client = ClientIndex(index);
            // A range that nobody ever had is empty.
            if self.ring.client(client).holder.epoch.load(Acquire) != 0
                && let Some(claim) = self.ring.board().scan(
                    self.ring.range(client),
                    &mut self.walker,
                    self.index,
                    can_run,
                )
            {
                return Some(ClaimedCall::new(&self.ring, claim));
            }
        }
        None
    }
}

impl<'s> ClaimedCall<'s> {
    #[inline(always)]
    fn new(ring: &'s PassRing, claim: Claim) -> Self {
        let call = Call::from_bits(ring.table.call(claim.slot).load(Relaxed));
        Self { ring, claim, call: call.check(ring.layout.geometry.payload_bytes) }
    }

    /// The call's description.
    ///
    /// # Errors
    ///
    /// The slot holds nonsense.
    pub fn call(&self) -> Result<Call, FrameError> {
        self.call
    }

    /// Which pass it is.
    pub fn pass(&self) -> PassId {
        PassId { slot: self.claim.slot, generation: self.claim.word.generation() }
    }

    /// Which run this is, from zero.
    pub fn attempt(&self) -> u8 {
        self.claim.word.attempt()
    }

    /// How long it may run, in microseconds, where the call is timed.
    pub fn deadline_us(&self) -> u64 {
        self.ring.table.slot(self.claim.slot).deadline_us.load(Relaxed)
    }

    /// Its arguments, where they lie, and the place for its reply.
    #[inline]
    pub fn parts(&mut self) -> (&[u8], ReplyWriter<'_>) {
        let bytes = self.call.map_or(0, |call| call.bytes as usize);
        let slot = self.ring.table.slot(self.claim.slot);
        let buffer =
            self.ring.buffer(self.claim.slot, &slot.arguments, bytes, Layout::argument_buffer);
        // SAFETY: the slot is CLAIMED by this worker, which is alive and so keeps it; nobody writes
        // its call before it is done, which takes this token. The length was checked. The reply lies
        // in other bytes.
        let arguments = unsafe { std::slice::from_raw_parts(buffer, bytes) };
        (arguments, ReplyWriter { ring: self.ring, slot: self.claim.slot, offered: 0 })
    }

    /// The reply is written: gives the slot back to its client, and tells it.
    #[inline]
    pub fn complete(self, reply: Reply) {
        self.ring.table.slot(self.claim.slot).reply.store(reply.to_bits(), Relaxed);
        if self.ring.board().complete(self.claim) {
            self.ring.tell_client(self.claim.slot);
        }
    }
}

impl ReplyWriter<'_> {
    /// Appends bytes, as long as they fit.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) {
        if !self.ring.is_here() {
            // The closure has forked: nothing of the child's goes anywhere.
            return;
        }
        let at = self.offered;
        self.offered += bytes.len() as u64;
        let limit = (self.ring.layout.geometry.payload_bytes as usize).max(INLINE_BYTES);
        if self.offered > limit as u64 {
            return;
        }
        let (at, end) = (at as usize, self.offered as usize);
        let inline: *mut u8 = self.ring.table.slot(self.slot).result.get().cast();
        let target = if end <= INLINE_BYTES {
            inline
        } else {
            let buffer: *mut u8 = self.ring.at(self.ring.layout.result_buffer(self.slot));
            if at <= INLINE_BYTES {
                // SAFETY: the first `at` bytes were written inline by this writer; see below.
                unsafe { buffer.copy_from_nonoverlapping(inline, at) };
            }
            buffer
        };
        // SAFETY: the slot is CLAIMED by the worker whose call made this writer, and the writer
        // borrows the call, so nobody else touches the bytes of its result; `end` is within the
        // payload, whose memory was committed before the call was submitted.
        unsafe { target.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Forgets what was written.
    pub fn clear(&mut self) {
        self.offered = 0;
    }

    /// Bytes that were offered.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Most bytes that fit.
    pub fn limit(&self) -> usize {
        (self.ring.layout.geometry.payload_bytes as usize).max(INLINE_BYTES)
    }
}
