//! The records of the pass file as structs of atomics: any process may write any of them at any time,
//! and this one stays sound. Their offsets are asserted against the table in
//! [`meshwork_protocol::pass::layout`].

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use meshwork_protocol::limits::{PASS_CLOSURES_MAX, PASS_NAME_BYTES_MAX};
use meshwork_protocol::pass::ClosureId;
use meshwork_protocol::pass::frame::INLINE_BYTES;
use meshwork_protocol::pass::layout::{
    CLIENT_ROW_BYTES, CLOSURE_ROW_BYTES, LINE_BYTES, SLOT_BYTES, WORKER_ROW_BYTES, field_offset,
};

/// A name in a record.
#[repr(C)]
#[derive(Debug)]
pub struct NameField {
    pub(super) bytes: AtomicU64,
    pub(super) text: [AtomicU64; PASS_NAME_BYTES_MAX / 8],
}

impl NameField {
    /// What there is room for of a name: [`PASS_NAME_BYTES_MAX`], cut at a character.
    pub fn cut(name: &str) -> &str {
        &name[..name.floor_char_boundary(PASS_NAME_BYTES_MAX)]
    }

    /// Writes a name, [`cut`](Self::cut).
    pub fn write(&self, name: &str) {
        let name = Self::cut(name);
        let end = name.len();
        let mut padded = [0; PASS_NAME_BYTES_MAX];
        padded[..end].copy_from_slice(name.as_bytes());
        for (word, eight) in self.text.iter().zip(padded.chunks_exact(8)) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(eight);
            word.store(u64::from_ne_bytes(bytes), Relaxed);
        }
        // Pair `name`.
        self.bytes.store(end as u64, Release);
    }

    /// The name; what is not UTF-8 in it is replaced.
    pub fn read(&self) -> String {
        // Pair `name`.
        let end = (self.bytes.load(Acquire) as usize).min(PASS_NAME_BYTES_MAX);
        let bytes: Vec<u8> =
            self.text.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).take(end).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The part of the header that changes.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct HeaderWords {
    fixed: [AtomicU64; 16],
    /// Counts who joins and leaves.
    pub roster: AtomicU64,
    /// Passes of dead workers that waited again.
    pub requeued: AtomicU64,
    /// Passes whose attempts were over.
    pub poisoned: AtomicU64,
    /// Replies that a client took over from its predecessor.
    pub adopted: AtomicU64,
    /// Replies that nobody came for.
    pub orphaned: AtomicU64,
}

/// Who holds a row.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Holder {
    /// Odd while the row is held.
    pub epoch: AtomicU64,
    /// Its process.
    pub pid: AtomicU32,
    /// When that process started, in ticks since the boot: tells it from a later one of its number.
    pub pid_start: AtomicU64,
    /// The namespace that the number is of; 0 where it is not known.
    pub pid_namespace: AtomicU64,
    /// When it joined, in microseconds since the boot.
    pub joined_us: AtomicU64,
}

/// A worker's row.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct WorkerRow {
    /// Who holds it.
    pub holder: Holder,
    pub(super) wake: AtomicU32,
    /// A bit for each closure that it runs, by the closure's row.
    pub runs: [AtomicU64; PASS_CLOSURES_MAX / 64],
    hot: WorkerHot,
    /// What it is called.
    pub name: NameField,
}

/// What a worker writes while it works.
#[repr(C, align(64))]
#[derive(Debug)]
struct WorkerHot {
    current: AtomicU64,
    deadline_us: AtomicU64,
    finished: AtomicU64,
    spare: [AtomicU64; 5],
}

impl WorkerRow {
    /// The slot of the timed pass that runs, plus one; 0 while none does.
    pub fn current(&self) -> &AtomicU64 {
        &self.hot.current
    }

    /// When that pass must have ended, in microseconds since the boot; 0 while none runs.
    pub fn deadline_us(&self) -> &AtomicU64 {
        &self.hot.deadline_us
    }

    /// Passes it has finished.
    pub fn finished(&self) -> &AtomicU64 {
        &self.hot.finished
    }

    /// What it waits on.
    pub fn wake_word(&self) -> &AtomicU32 {
        &self.wake
    }
}

/// A client's row.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ClientRow {
    /// Who holds it.
    pub holder: Holder,
    pub(super) wake: AtomicU32,
    pub(super) sleeping: AtomicU64,
    hot: ClientHot,
    /// What it is called.
    pub name: NameField,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct ClientHot {
    collected: AtomicU64,
    left_us: AtomicU64,
    spare: [AtomicU64; 6],
}

impl ClientRow {
    /// Replies it has collected.
    pub fn collected(&self) -> &AtomicU64 {
        &self.hot.collected
    }

    /// When its end was noticed, in microseconds since the boot; 0 while it is there.
    pub fn left_us(&self) -> &AtomicU64 {
        &self.hot.left_us
    }

    /// Nonzero while it waits.
    pub fn sleeping(&self) -> &AtomicU64 {
        &self.sleeping
    }

    /// What it waits on.
    pub fn wake_word(&self) -> &AtomicU32 {
        &self.wake
    }
}

/// A closure's row. Taken once, and for good.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ClosureRow {
    pub(super) id: AtomicU64,
    /// What it is called.
    pub name: NameField,
}

/// Two words on lines of their own.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Line(pub(super) AtomicU64);

/// A slot.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Slot {
    pub(super) word: AtomicU64,
    pub(super) call: AtomicU64,
    pub(super) arguments: UnsafeCell<[u8; INLINE_BYTES]>,
    pub(super) reply: AtomicU64,
    pub(super) result: UnsafeCell<[u8; INLINE_BYTES]>,
    unused: AtomicU64,
    pub(super) tag: AtomicU64,
    pub(super) deadline_us: AtomicU64,
    spare: [AtomicU64; 14],
}

const _: () = {
    macro_rules! holds {
        ($type:ty, $record:literal, $($field:ident).+ = $name:literal) => {
            assert!(offset_of!($type, $($field).+) == field_offset($record, $name));
        };
    }
    assert!(size_of::<WorkerRow>() == WORKER_ROW_BYTES);
    assert!(size_of::<ClientRow>() == CLIENT_ROW_BYTES);
    assert!(size_of::<ClosureRow>() == CLOSURE_ROW_BYTES);
    assert!(size_of::<Slot>() == SLOT_BYTES);
    assert!(size_of::<Line>() == LINE_BYTES);
    holds!(HeaderWords, "header", roster = "roster");
    holds!(HeaderWords, "header", requeued = "requeued");
    holds!(HeaderWords, "header", poisoned = "poisoned");
    holds!(HeaderWords, "header", adopted = "adopted");
    holds!(HeaderWords, "header", orphaned = "orphaned");
    holds!(WorkerRow, "worker", holder.epoch = "epoch");
    holds!(WorkerRow, "worker", holder.pid = "pid");
    holds!(WorkerRow, "worker", holder.pid_start = "pid_start");
    holds!(WorkerRow, "worker", holder.pid_namespace = "pid_namespace");
    holds!(WorkerRow, "worker", holder.joined_us = "joined_us");
    holds!(WorkerRow, "worker", wake = "wake");
    holds!(WorkerRow, "worker", runs = "runs");
    holds!(WorkerRow, "worker", hot.current = "current");
    holds!(WorkerRow, "worker", hot.deadline_us = "deadline_us");
    holds!(WorkerRow, "worker", hot.finished = "finished");
    holds!(WorkerRow, "worker", name.bytes = "name_bytes");
    holds!(WorkerRow, "worker", name.text = "name");
    holds!(ClientRow, "client", holder.epoch = "epoch");
    holds!(ClientRow, "client", wake = "wake");
    holds!(ClientRow, "client", sleeping = "sleeping");
    holds!(ClientRow, "client", hot.collected = "collected");
    holds!(ClientRow, "client", hot.left_us = "left_us");
    holds!(ClientRow, "client", name.bytes = "name_bytes");
    holds!(ClientRow, "client", name.text = "name");
    holds!(ClosureRow, "closure", id = "id");
    holds!(ClosureRow, "closure", name.bytes = "name_bytes");
    holds!(ClosureRow, "closure", name.text = "name");
    holds!(Slot, "slot", word = "word");
    holds!(Slot, "slot", call = "call");
    holds!(Slot, "slot", arguments = "arguments");
    holds!(Slot, "slot", reply = "reply");
    holds!(Slot, "slot", tag = "tag");
    holds!(Slot, "slot", result = "result");
    holds!(Slot, "slot", deadline_us = "deadline_us");
};

impl ClosureRow {
    /// The closure that has it.
    pub fn id(&self) -> Option<ClosureId> {
        let id = self.id.load(Acquire);
        (id != 0).then_some(ClosureId(id as u32))
    }
}
