//! Where every byte of a pass file lies.
//!
//! The file is made for one [`Geometry`], which stands in its header; all offsets follow from it.
//! Numbers are in the machine's own byte order (the file never leaves the machine, and the struct
//! hash includes the order). [`FIELDS`] is the table of what each record holds, where, and who
//! writes it when; the struct hash is taken over it, so two builds that would read a file differently
//! refuse each other's.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use super::frame::{Call, DISOWNED, INLINE_BYTES, Reply, Status};
use super::slot::{SlotWord, WORKER_BITS};
use super::{ClosureId, Priority, WorkerIndex};
use crate::limits::{
    PASS_CLIENT_SLOTS_MAX, PASS_CLIENT_SLOTS_MIN, PASS_CLIENTS_MAX, PASS_CLOSURES_MAX,
    PASS_PAYLOAD_BYTES_END, PASS_SLOTS_MAX, PASS_WORKERS_MAX,
};

/// The first eight bytes of a finished file. They are written last.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"mwpasses");

/// The layout's version.
pub const VERSION: u32 = 1;

/// Bytes of the header's page.
pub const HEADER_BYTES: usize = 4_096;
/// Bytes of a worker's row.
pub const WORKER_ROW_BYTES: usize = 256;
/// Bytes of a client's row.
pub const CLIENT_ROW_BYTES: usize = 256;
/// Bytes of a closure's row.
pub const CLOSURE_ROW_BYTES: usize = 64;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 256;
/// Bytes that keep two words of different writers out of each other's cache lines; processors
/// prefetch lines in pairs.
pub const LINE_BYTES: usize = 128;
/// Bytes of a page: what the buffers are aligned to.
pub const PAGE_BYTES: usize = 4_096;

/// Slots whose completions share a word.
pub const WORD_SLOTS: u32 = 64;

const _: () = assert!(PASS_CLIENT_SLOTS_MIN.is_multiple_of(WORD_SLOTS), "a range has whole words");

/// Who writes a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// Whoever makes the file, before anyone can see it.
    Creator,
    /// The worker that holds the row.
    Worker,
    /// The client that holds the row.
    Client,
    /// Whoever owns the slot, as its word says.
    Owner,
    /// Any process, atomically.
    Anyone,
}

/// A field of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its record.
    pub record: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Bytes from the record's start.
    pub offset: usize,
    /// Its width in bytes.
    pub bytes: usize,
    /// Who writes it.
    pub writer: Writer,
    /// When.
    pub when: &'static str,
}

const fn field(
    record: &'static str,
    name: &'static str,
    offset: usize,
    bytes: usize,
    writer: Writer,
    when: &'static str,
) -> Field {
    Field { record, name, offset, bytes, writer, when }
}

/// Every field. Of a row, whoever has taken the lock of its dead holder writes as that would: to free
/// it, or to say when its end was seen.
pub const FIELDS: &[Field] = &[
    field("header", "magic", 0, 8, Writer::Creator, "last, when the file is whole"),
    field("header", "version", 8, 4, Writer::Creator, "before the magic"),
    field("header", "clients", 12, 4, Writer::Creator, "before the magic"),
    field("header", "struct_hash", 16, 8, Writer::Creator, "before the magic"),
    field("header", "file_bytes", 24, 8, Writer::Creator, "before the magic"),
    field("header", "boot_id", 32, 16, Writer::Creator, "before the magic"),
    field("header", "instance_id", 48, 16, Writer::Creator, "before the magic"),
    field("header", "slots_per_client", 64, 4, Writer::Creator, "before the magic"),
    field("header", "workers", 68, 4, Writer::Creator, "before the magic"),
    field("header", "payload_bytes", 72, 4, Writer::Creator, "before the magic"),
    field("header", "roster", 128, 8, Writer::Anyone, "a worker or client joins or leaves"),
    field("header", "requeued", 136, 8, Writer::Anyone, "a dead worker's passes wait again"),
    field("header", "poisoned", 144, 8, Writer::Anyone, "a pass's attempts are over"),
    field("header", "adopted", 152, 8, Writer::Anyone, "a client takes its predecessor's replies"),
    field("header", "orphaned", 160, 8, Writer::Anyone, "a reply's time is over, unread"),
    field("worker", "epoch", 0, 8, Writer::Worker, "odd while held: at joining and leaving"),
    field("worker", "pid", 8, 4, Writer::Worker, "at joining"),
    field("worker", "pid_start", 16, 8, Writer::Worker, "at joining"),
    field("worker", "pid_namespace", 24, 8, Writer::Worker, "at joining"),
    field("worker", "joined_us", 32, 8, Writer::Worker, "at joining"),
    field("worker", "wake", 64, 4, Writer::Anyone, "the worker is woken"),
    field("worker", "runs", 72, 32, Writer::Worker, "it has a closure more, or fewer"),
    field("worker", "current", 128, 8, Writer::Worker, "a timed pass begins and ends"),
    field("worker", "deadline_us", 136, 8, Writer::Worker, "a timed pass begins and ends"),
    field("worker", "finished", 144, 8, Writer::Worker, "a pass ends"),
    field("worker", "name_bytes", 192, 8, Writer::Worker, "at joining"),
    field("worker", "name", 200, 48, Writer::Worker, "at joining"),
    field("client", "epoch", 0, 8, Writer::Client, "odd while held: at joining and leaving"),
    field("client", "pid", 8, 4, Writer::Client, "at joining"),
    field("client", "pid_start", 16, 8, Writer::Client, "at joining"),
    field("client", "pid_namespace", 24, 8, Writer::Client, "at joining"),
    field("client", "joined_us", 32, 8, Writer::Client, "at joining"),
    field("client", "wake", 64, 4, Writer::Anyone, "the client is woken"),
    field("client", "sleeping", 72, 8, Writer::Anyone, "it waits; whoever wakes it clears it"),
    field("client", "collected", 128, 8, Writer::Client, "replies are collected"),
    field("client", "left_us", 136, 8, Writer::Anyone, "its death is first seen"),
    field("client", "name_bytes", 192, 8, Writer::Client, "at joining"),
    field("client", "name", 200, 48, Writer::Client, "at joining"),
    field("closure", "id", 0, 8, Writer::Anyone, "first registered: 1 << 32 | id, for good"),
    field("closure", "name_bytes", 8, 8, Writer::Anyone, "after the name"),
    field("closure", "name", 16, 48, Writer::Anyone, "after the id"),
    field(
        "beat",
        "count",
        0,
        8,
        Writer::Owner,
        "its row's process beats; 0 while nobody has the row",
    ),
    field("sleepers", "bits", 0, 8, Writer::Anyone, "a worker falls asleep, or is woken"),
    field("completions", "bits", 0, 8, Writer::Anyone, "a reply is there, or is collected"),
    field("cell", "hint", 0, 8, Writer::Anyone, "a hint is left, or taken"),
    field("ring", "tail", 0, 8, Writer::Anyone, "a hint is left"),
    field("ring", "head", 128, 8, Writer::Anyone, "a hint is taken"),
    field("slot", "word", 0, 8, Writer::Owner, "each change of state"),
    field("slot", "call", 8, 8, Writer::Owner, "client, FREE; the next one of its range: disowned"),
    field("slot", "arguments", 16, 48, Writer::Owner, "client, FREE"),
    field("slot", "reply", 64, 8, Writer::Owner, "worker, CLAIMED; who buries it: poisoned"),
    field("slot", "result", 72, 48, Writer::Owner, "worker, CLAIMED"),
    field("slot", "tag", 128, 8, Writer::Owner, "client, FREE"),
    field("slot", "deadline_us", 136, 8, Writer::Owner, "client, FREE, where timed"),
];

const fn offset_of(record: &str, name: &str) -> usize {
    let mut index = 0;
    while index < FIELDS.len() {
        if same(FIELDS[index].record, record) && same(FIELDS[index].name, name) {
            return FIELDS[index].offset;
        }
        index += 1;
    }
    panic!("no such field");
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Where a field lies in its record. For assertions beside the structs that follow this table: an
/// unknown field does not compile.
pub const fn field_offset(record: &str, name: &str) -> usize {
    offset_of(record, name)
}

const _: () = {
    let mut index = 0;
    while index < FIELDS.len() {
        let field = FIELDS[index];
        let record_bytes = match field.record.as_bytes() {
            b"header" => HEADER_BYTES,
            b"worker" => WORKER_ROW_BYTES,
            b"client" => CLIENT_ROW_BYTES,
            b"closure" => CLOSURE_ROW_BYTES,
            b"beat" | b"sleepers" | b"cell" => 8,
            b"completions" => LINE_BYTES,
            b"ring" => 2 * LINE_BYTES,
            b"slot" => SLOT_BYTES,
            _ => panic!("an unknown record"),
        };
        assert!(field.offset + field.bytes <= record_bytes, "a field leaves its record");
        assert!(field.bytes != 8 || field.offset.is_multiple_of(8), "a word is not aligned");
        if index > 0 && same(FIELDS[index - 1].record, field.record) {
            let before = FIELDS[index - 1];
            assert!(before.offset + before.bytes <= field.offset, "two fields overlap");
        }
        index += 1;
    }
    assert!(offset_of("slot", "arguments") + INLINE_BYTES == 64, "a call fills one line");
    assert!(offset_of("slot", "reply") == 64, "a reply begins a line");
    assert!(offset_of("slot", "result") + INLINE_BYTES <= 128, "a reply fits its line");
    assert!(offset_of("slot", "tag") == 128, "what the client alone writes has a line");
};

/// What a file is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    /// Clients that can be there at once: 1 to 256.
    pub clients: u32,
    /// Slots of each: a power of two from 64 to 4,096. This many of its passes can be under way.
    pub slots_per_client: u32,
    /// Workers (threads of all processes) that can be there at once: a multiple of 64 up to 1,024.
    pub workers: u32,
    /// Most bytes of arguments, and of a result: a multiple of 4,096 up to 512 KiB less a page.
    pub payload_bytes: u32,
}

impl Default for Geometry {
    /// 16 clients with 512 slots each, 64 workers, 64 KiB. The file takes 2.4 MiB; buffers for
    /// payloads over 48 bytes are added to it when a slot first needs them.
    fn default() -> Self {
        Self { clients: 16, slots_per_client: 512, workers: 64, payload_bytes: 64 << 10 }
    }
}

/// Why no file can be made so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The number of clients.
    #[error("clients must be 1 to {PASS_CLIENTS_MAX}, not {0}")]
    Clients(u32),
    /// The number of slots of each client.
    #[error(
        "slots_per_client must be a power of two from {PASS_CLIENT_SLOTS_MIN} to {PASS_CLIENT_SLOTS_MAX}, not {0}"
    )]
    Slots(u32),
    /// The number of workers.
    #[error("workers must be a multiple of 64 up to {PASS_WORKERS_MAX}, not {0}")]
    Workers(u32),
    /// The payload.
    #[error("payload_bytes must be a multiple of 4096 and under {PASS_PAYLOAD_BYTES_END}, not {0}")]
    Payload(u32),
    /// All slots together.
    #[error("clients times slots_per_client must be at most {PASS_SLOTS_MAX}, not {0}")]
    AllSlots(u32),
}

/// Offsets in the file, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What it is for.
    pub geometry: Geometry,
    /// The workers' rows.
    pub workers: usize,
    /// The clients' rows.
    pub clients: usize,
    /// The closures' rows.
    pub closures: usize,
    /// The heartbeat table: a word for each worker, then one for each client.
    pub beats: usize,
    /// A bit for each sleeping worker.
    pub sleepers: usize,
    /// For each client a line for each 64 slots: which may be done.
    pub completions: usize,
    /// Head and tail of the two hint rings, high priority first.
    pub rings: usize,
    /// The cells of the two.
    pub cells: usize,
    /// Cells of one: a power of two, at least twice the slots, so that hints of passes that were
    /// taken back leave room for one of each slot.
    pub ring_cells: u32,
    /// The slots, client by client.
    pub slots: usize,
    /// The end of what the file always has; from here on it has holes.
    pub fixed_bytes: usize,
    /// The whole file.
    pub file_bytes: usize,
}

impl Layout {
    /// The layout for a geometry.
    ///
    /// # Errors
    ///
    /// The first number that is out of its range.
    pub fn new(geometry: Geometry) -> Result<Self, GeometryError> {
        let Geometry { clients, slots_per_client, workers, payload_bytes } = geometry;
        if !(1..=PASS_CLIENTS_MAX).contains(&clients) {
            return Err(GeometryError::Clients(clients));
        }
        if !(PASS_CLIENT_SLOTS_MIN..=PASS_CLIENT_SLOTS_MAX).contains(&slots_per_client)
            || !slots_per_client.is_power_of_two()
        {
            return Err(GeometryError::Slots(slots_per_client));
        }
        if !(1..=PASS_WORKERS_MAX).contains(&workers) || !workers.is_multiple_of(64) {
            return Err(GeometryError::Workers(workers));
        }
        if payload_bytes as usize >= PASS_PAYLOAD_BYTES_END
            || !(payload_bytes as usize).is_multiple_of(PAGE_BYTES)
        {
            return Err(GeometryError::Payload(payload_bytes));
        }
        let all_slots = clients * slots_per_client;
        if all_slots > PASS_SLOTS_MAX {
            return Err(GeometryError::AllSlots(all_slots));
        }
        let mut end = HEADER_BYTES;
        let mut place = |bytes: usize| {
            let at = end;
            end = (end + bytes).next_multiple_of(LINE_BYTES);
            at
        };
        let workers_at = place(workers as usize * WORKER_ROW_BYTES);
        let clients_at = place(clients as usize * CLIENT_ROW_BYTES);
        let closures = place(PASS_CLOSURES_MAX * CLOSURE_ROW_BYTES);
        let beats = place((workers + clients) as usize * 8);
        let sleepers = place(workers as usize / 64 * 8);
        let completions = place((all_slots / WORD_SLOTS) as usize * LINE_BYTES);
        let rings = place(2 * 2 * LINE_BYTES);
        let cells = place(2 * ring_cells(geometry) as usize * 8);
        let slots = place(all_slots as usize * SLOT_BYTES);
        let fixed_bytes = end.next_multiple_of(PAGE_BYTES);
        let file_bytes = fixed_bytes + 2 * all_slots as usize * payload_bytes as usize;
        Ok(Self {
            geometry,
            workers: workers_at,
            clients: clients_at,
            closures,
            beats,
            sleepers,
            completions,
            rings,
            cells,
            ring_cells: ring_cells(geometry),
            slots,
            fixed_bytes,
            file_bytes,
        })
    }

    /// All slots.
    pub fn slot_count(&self) -> u32 {
        self.geometry.clients * self.geometry.slots_per_client
    }

    /// Where a slot's buffer for results begins. The results of one client lie together, and so do
    /// its arguments: neighbouring slots are given memory in one step.
    pub fn result_buffer(&self, slot: u32) -> usize {
        self.buffer(slot, 0)
    }

    /// Where a slot's buffer for arguments begins.
    pub fn argument_buffer(&self, slot: u32) -> usize {
        self.buffer(slot, 1)
    }

    fn buffer(&self, slot: u32, kind: usize) -> usize {
        let each = self.geometry.slots_per_client as usize;
        let (client, index) = (slot as usize >> each.trailing_zeros(), slot as usize & (each - 1));
        let payload = self.geometry.payload_bytes as usize;
        self.fixed_bytes + ((2 * client + kind) * each + index) * payload
    }
}

fn ring_cells(geometry: Geometry) -> u32 {
    (2 * geometry.clients * geometry.slots_per_client).next_power_of_two()
}

/// The hash over all that two builds must agree on: the table, where the sections lie, and a specimen
/// of each kind of word.
pub fn struct_hash() -> u64 {
    let mut text = format!(
        "{VERSION} {:x} {} {PASS_CLOSURES_MAX} {LINE_BYTES} {INLINE_BYTES}",
        u32::from_ne_bytes([1, 2, 3, 4]),
        1 << WORKER_BITS,
    );
    for field in FIELDS {
        text += &format!(";{}.{} {} {}", field.record, field.name, field.offset, field.bytes);
    }
    for word in specimens() {
        text += &format!(";{word:x}");
    }
    text += &format!("{:?}", Layout::new(Geometry::default()));
    xxh3_64(text.as_bytes())
}

fn specimens() -> [u64; 5] {
    let call = Call {
        closure: ClosureId(0x0102_0304),
        bytes: 5,
        attempts: 6,
        priority: Priority::Low,
        timed: true,
    };
    let reply = Reply { status: Status::Unreadable, bytes: 7, cut: true };
    let word = SlotWord::UNUSED.ready().and_then(|ready| ready.claimed(WorkerIndex(3)));
    let word = word.and_then(SlotWord::requeued).map_or(0, SlotWord::bits);
    [call.to_bits(), DISOWNED, reply.to_bits(), word, super::ring::hint_bits(8, 9, 10)]
}

/// The header of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the file is made for.
    pub geometry: Geometry,
    /// The boot of the machine that it was made in.
    pub boot_id: [u8; 16],
    /// This file, and no other of that boot.
    pub instance_id: [u8; 16],
}

/// Why a file is not one that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Shorter than a header, or than the header says.
    #[error("the file has {found} bytes where {needed} are needed: it was cut short")]
    Short {
        /// Its size.
        found: u64,
        /// What it should have.
        needed: u64,
    },
    /// It does not begin as one.
    #[error("the file is no pass file: it does not begin with the magic")]
    Magic,
    /// Made by another version.
    #[error("the file has layout {found}, this program reads layout {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// Made by a build that lays out the records differently.
    #[error("the file's records are laid out differently: it was made by another build")]
    StructHash,
    /// Numbers that no file is made for.
    #[error("the file's header is damaged: {0}")]
    Geometry(#[from] GeometryError),
}

impl Header {
    /// The header's bytes, without the magic: it is written when the rest is in place.
    pub fn to_bytes(self, layout: &Layout) -> [u8; 128] {
        let mut bytes = [0; 128];
        let mut put = |name: &str, value: &[u8]| {
            let at = offset_of("header", name);
            bytes[at..at + value.len()].copy_from_slice(value);
        };
        put("version", &VERSION.to_ne_bytes());
        put("clients", &self.geometry.clients.to_ne_bytes());
        put("struct_hash", &struct_hash().to_ne_bytes());
        put("file_bytes", &(layout.file_bytes as u64).to_ne_bytes());
        put("boot_id", &self.boot_id);
        put("instance_id", &self.instance_id);
        put("slots_per_client", &self.geometry.slots_per_client.to_ne_bytes());
        put("workers", &self.geometry.workers.to_ne_bytes());
        put("payload_bytes", &self.geometry.payload_bytes.to_ne_bytes());
        bytes
    }

    /// Reads the beginning of a file, before it is mapped. `file_bytes` is the file's size.
    ///
    /// # Errors
    ///
    /// The first thing that makes it unusable. Whether it is of this boot is for the caller to see.
    pub fn from_bytes(bytes: &[u8], file_bytes: u64) -> Result<(Self, Layout), HeaderError> {
        let short = |needed: usize| HeaderError::Short { found: file_bytes, needed: needed as u64 };
        if bytes.len() < 128 || file_bytes < HEADER_BYTES as u64 {
            return Err(short(HEADER_BYTES));
        }
        let u32_at = |name: &str| {
            let at = offset_of("header", name);
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let array_at = |name: &str| {
            let at = offset_of("header", name);
            let mut value = [0; 16];
            value.copy_from_slice(&bytes[at..at + 16]);
            value
        };
        let u64_at = |name: &str| {
            let at = offset_of("header", name);
            let mut value = [0; 8];
            value.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(value)
        };
        if u64_at("magic") != MAGIC {
            return Err(HeaderError::Magic);
        }
        if u32_at("version") != VERSION {
            return Err(HeaderError::Version { found: u32_at("version") });
        }
        if u64_at("struct_hash") != struct_hash() {
            return Err(HeaderError::StructHash);
        }
        let geometry = Geometry {
            clients: u32_at("clients"),
            slots_per_client: u32_at("slots_per_client"),
            workers: u32_at("workers"),
            payload_bytes: u32_at("payload_bytes"),
        };
        let layout = Layout::new(geometry)?;
        if file_bytes != layout.file_bytes as u64 || u64_at("file_bytes") != file_bytes {
            return Err(short(layout.file_bytes));
        }
        let header =
            Self { geometry, boot_id: array_at("boot_id"), instance_id: array_at("instance_id") };
        Ok((header, layout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file() -> (Header, Layout, Vec<u8>) {
        let geometry = Geometry::default();
        let layout = Layout::new(geometry).unwrap();
        let header = Header { geometry, boot_id: [1; 16], instance_id: [2; 16] };
        let mut bytes = header.to_bytes(&layout).to_vec();
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        (header, layout, bytes)
    }

    #[test]
    fn the_default_file_is_laid_out_so() {
        let layout = Layout::new(Geometry::default()).unwrap();
        let Layout { workers, clients, closures, beats, sleepers, .. } = layout;
        assert_eq!(
            (workers, clients, closures, beats, sleepers),
            (4096, 20480, 24576, 40960, 41600)
        );
        let Layout { completions, rings, cells, slots, fixed_bytes, file_bytes, .. } = layout;
        assert_eq!((completions, rings, cells, slots), (41728, 58112, 58624, 320768));
        assert_eq!((fixed_bytes, file_bytes), (2420736, 1076162560));
        assert_eq!(layout.ring_cells, 16_384);
        assert_eq!(layout.result_buffer(0), fixed_bytes);
        assert_eq!(layout.argument_buffer(0), fixed_bytes + 512 * 65_536);
        assert_eq!(layout.result_buffer(512), fixed_bytes + 1_024 * 65_536);
        assert_eq!(layout.argument_buffer(8_191) + 65_536, file_bytes);
    }

    #[test]
    fn the_struct_hash_is_of_this_layout() {
        assert_eq!(struct_hash(), 0x5a9a54b015c5017a);
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let (header, layout, bytes) = file();
        assert_eq!(Header::from_bytes(&bytes, layout.file_bytes as u64), Ok((header, layout)));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_named() {
        let (_, layout, good) = file();
        let size = layout.file_bytes as u64;
        let read = |change: &dyn Fn(&mut Vec<u8>), size: u64| {
            let mut bytes = good.clone();
            change(&mut bytes);
            Header::from_bytes(&bytes, size).unwrap_err().to_string()
        };
        assert_eq!(
            read(&|b| b.clear(), 0),
            "the file has 0 bytes where 4096 are needed: it was cut short"
        );
        assert_eq!(
            read(&|_| {}, size - 1),
            "the file has 1076162559 bytes where 1076162560 are needed: it was cut short"
        );
        assert_eq!(
            read(&|b| b[0] = 0, size),
            "the file is no pass file: it does not begin with the magic"
        );
        assert_eq!(
            read(&|b| b[8..12].copy_from_slice(&7u32.to_ne_bytes()), size),
            "the file has layout 7, this program reads layout 1"
        );
        assert_eq!(
            read(&|b| b[16] ^= 1, size),
            "the file's records are laid out differently: it was made by another build"
        );
        assert_eq!(
            read(&|b| b[12..16].fill(0xff), size),
            "the file's header is damaged: clients must be 1 to 256, not 4294967295"
        );
    }

    #[test]
    fn geometries_out_of_range_are_refused() {
        let with = |change: fn(&mut Geometry)| {
            let mut geometry = Geometry::default();
            change(&mut geometry);
            Layout::new(geometry).unwrap_err()
        };
        assert_eq!(with(|g| g.clients = 0), GeometryError::Clients(0));
        assert_eq!(with(|g| g.slots_per_client = 100), GeometryError::Slots(100));
        assert_eq!(with(|g| g.slots_per_client = 192), GeometryError::Slots(192));
        assert_eq!(with(|g| g.workers = 0), GeometryError::Workers(0));
        assert_eq!(with(|g| g.payload_bytes = 100), GeometryError::Payload(100));
        assert_eq!(
            with(|g| (g.clients, g.slots_per_client) = (256, 4_096)),
            GeometryError::AllSlots(1 << 20)
        );
    }

    proptest! {
        #[test]
        fn random_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..256), size: u64) {
            prop_assert!(Header::from_bytes(&bytes, size).is_err());
        }

        #[test]
        fn sections_of_any_layout_follow_each_other(
            clients in 1u32..=256, doublings in 0u32..=6, workers in 1u32..=16, pages in 0u32..=127,
        ) {
            let geometry = Geometry {
                clients,
                slots_per_client: WORD_SLOTS << doublings,
                workers: workers * 64,
                payload_bytes: pages * 4_096,
            };
            let Ok(layout) = Layout::new(geometry) else { return Ok(()) };
            let sections = [
                HEADER_BYTES, layout.workers, layout.clients, layout.closures, layout.beats,
                layout.sleepers, layout.completions, layout.rings, layout.cells, layout.slots,
                layout.fixed_bytes,
            ];
            prop_assert!(sections.is_sorted());
            prop_assert!(sections.iter().all(|at| at % LINE_BYTES == 0));
            prop_assert!(layout.slots + layout.slot_count() as usize * SLOT_BYTES <= layout.fixed_bytes);
            if pages > 0 {
                let last = layout.slot_count() - 1;
                prop_assert_eq!(
                    layout.argument_buffer(last) + geometry.payload_bytes as usize,
                    layout.file_bytes
                );
            }
        }
    }
}
