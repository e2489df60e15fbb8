//! Every bound of the protocol, with its reason and how it relates to the others.

use std::time::Duration;

/// Longest node id, tenant, key or handler name, in bytes of UTF-8. Small enough that a member
/// record always fits a datagram beside a ping.
pub const NAME_BYTES_MAX: usize = 64;

/// Largest datagram that a node sends, in bytes of UDP payload: under the 1,500 bytes of an
/// Ethernet frame with room for IPv6, UDP and a tunnel's headers, so it is never fragmented.
pub const DATAGRAM_BYTES_MAX: usize = 1_400;

/// The clear header: magic 2, version 1, key id 1, mesh id 4.
pub const DATAGRAM_HEADER_BYTES: usize = 8;

/// What sealing adds: nonce 24, tag 16. Reserved even without a key, so that turning encryption on
/// never makes a message too large.
pub const SEAL_BYTES: usize = 24 + 16;

/// What is left for the encoded message.
pub const DATAGRAM_BODY_BYTES_MAX: usize = DATAGRAM_BYTES_MAX - DATAGRAM_HEADER_BYTES - SEAL_BYTES;

/// Most updates, and most loads, that a datagram may announce: what one byte counts. The smallest
/// of either has ten bytes, so the body's size is the tighter bound.
pub const DATAGRAM_ITEMS_MAX: usize = 250;

/// Largest payload of a stream frame, in bytes.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Bound on what a decoder may claim for one datagram. A small integer of one byte claims eight, so
/// no message that a node sends needs more than eight times its size.
pub const DATAGRAM_DECODE_BYTES_MAX: usize = 16 * DATAGRAM_BYTES_MAX;

/// The same for a stream frame.
pub const FRAME_DECODE_BYTES_MAX: usize = 16 * FRAME_BYTES_MAX;

/// Most members that a table holds, dead ones and tombstones included. At 1,000 live nodes this
/// leaves three boots of each remembered.
pub const MEMBERS_MAX: usize = 4_096;

/// Most member records in one chunk of a state exchange; a record is at most
/// [`MEMBER_BYTES_MAX`] bytes.
pub const STATE_CHUNK_MEMBERS_MAX: usize = 512;

/// Largest encoded member record: the name with its length, two socket addresses (IPv6, tagged),
/// generation, incarnation, state.
pub const MEMBER_BYTES_MAX: usize = NAME_BYTES_MAX + 1 + 2 * (1 + 16 + 3) + 9 + 5 + 1;

/// Largest encoded arguments of a job, in bytes of JSON.
pub const ARGUMENT_BYTES_MAX: usize = 1 << 20;

/// Arguments over this travel in no offer: the thief reads them from the store by id.
pub const INLINE_ARGUMENT_BYTES_MAX: usize = 32 << 10;

/// Longest error text kept with an outcome, in bytes; longer ones are cut at a character.
pub const ERROR_BYTES_MAX: usize = 4 << 10;

/// Largest result of a job, in bytes of JSON.
pub const RESULT_BYTES_MAX: usize = 1 << 20;

/// Most jobs in one steal, whatever is configured: ids and claims of all of them, without
/// arguments, fit one frame many times over.
pub const STEAL_BATCH_MAX: usize = 1_024;

/// Most job ids in a `Finished` hint: 16 bytes each, beside the sender's name.
pub const FINISHED_IDS_MAX: usize = 64;

/// Most peers that a victim remembers as idle.
pub const LIFELINES_MAX: usize = 64;

/// Most peers that the steal rate limit keeps a window for; the oldest is forgotten first.
pub const RATE_LIMIT_PEERS_MAX: usize = 1_024;

/// Time to open a connection to a peer.
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// Time from a request to the whole of its answer.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an offer stands before the victim retakes it: a connect and a response, twice over.
pub const OFFER_EXPIRY: Duration = Duration::from_secs(5);

/// Largest capacity of a deque, whatever is configured: its length is told to peers as a `u32`, and
/// a million buffered jobs are already minutes of work that the store could have given to others.
pub const DEQUE_CAPACITY_MAX: usize = 1 << 20;

/// Most requests a second that the steal rate limit counts for one peer: it keeps the time of each.
/// A higher configured limit counts as this one.
pub const STEAL_RATE_MAX: u32 = 1_000;

/// Most bytes of whole jobs in one offer, arguments and all; the jobs beyond are named, and the
/// thief reads them from the store. Leaves room for [`STEAL_BATCH_MAX`] names in the same frame.
pub const OFFER_INLINE_BYTES_MAX: usize = FRAME_BYTES_MAX / 2;

/// A victim's reminder to a lifeline that did not come for what it was told of: not before this
/// long after the last one, unless the backlog has doubled meanwhile.
pub const HINT_AGAIN: Duration = Duration::from_secs(1);

/// How long a thief waits for the answer to a request before it counts it as failed. The connection
/// has time-outs of its own; this one holds when the answer was lost inside the node.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a thief waits for the store to answer a transfer, or a reading back, before it asks what
/// became of it.
pub const TRANSFER_TIMEOUT: Duration = RESPONSE_TIMEOUT;

/// Attempts at reading back a transfer whose answer was lost. After these the thief forgets it: the
/// victim's retake decides, or the node's own listing of its claims.
pub const READ_BACK_TRIES_MAX: u32 = 5;

/// Time from a retake that failed to the next.
pub const RETAKE_RETRY: Duration = Duration::from_secs(1);

/// How long a thief avoids a victim after a request failed; doubles with each further failure.
pub const STEAL_BACKOFF: Duration = Duration::from_millis(500);

/// The avoidance grows no longer than this: a victim is never given up while it is a live member.
pub const STEAL_BACKOFF_MAX: Duration = Duration::from_secs(30);

const _: () = assert!(
    DATAGRAM_BODY_BYTES_MAX / 10 < DATAGRAM_ITEMS_MAX,
    "a datagram is full before its counts need a second byte"
);
const _: () = assert!(DATAGRAM_BODY_BYTES_MAX >= 1_024, "a ping and several updates must fit");
const _: () = assert!(
    STATE_CHUNK_MEMBERS_MAX * MEMBER_BYTES_MAX < FRAME_BYTES_MAX,
    "a chunk of the state exchange fits a frame"
);
const _: () = assert!(
    16 * FINISHED_IDS_MAX + 2 * NAME_BYTES_MAX < DATAGRAM_BODY_BYTES_MAX,
    "a hint of finished jobs fits a datagram"
);
const _: () = assert!(
    OFFER_EXPIRY.as_millis() >= CONNECT_TIMEOUT.as_millis() + 2 * RESPONSE_TIMEOUT.as_millis(),
    "an offer outlives the exchange that settles it"
);

const _: () = assert!(
    ASK_TIMEOUT.as_millis() > CONNECT_TIMEOUT.as_millis() + RESPONSE_TIMEOUT.as_millis(),
    "a request outlives the time-outs of its connection"
);
const _: () = assert!(
    OFFER_INLINE_BYTES_MAX > 2 * INLINE_ARGUMENT_BYTES_MAX,
    "a job that may travel whole fits an offer"
);
const _: () = assert!(
    OFFER_INLINE_BYTES_MAX + 64 * STEAL_BATCH_MAX < FRAME_BYTES_MAX,
    "an offer fits a frame: a named job is an id, a token and a tag"
);

/// Longest key of a job, in bytes.
pub const KEY_BYTES_MAX: usize = 256;

/// Most names or addresses that a node tries to join by.
pub const SEEDS_MAX: usize = 64;

/// Most indirect probes that a node makes for others at one time. A member asks for at most
/// [`INDIRECT_PINGS_MAX`] a period, so this serves as many askers as ever choose one helper at
/// once; beyond it the asker misses one helper of several.
pub const RELAYS_MAX: usize = 256;

/// Most helpers of one probe, whatever is configured.
pub const INDIRECT_PINGS_MAX: usize = 16;

/// Most newcomers whose admission waits for the holder of their name to answer.
pub const ADMISSIONS_MAX: usize = 64;

/// How long the holder of a newcomer's name has to answer: less than the newcomer waits.
pub const ADMISSION_WAIT: Duration = Duration::from_secs(1);

/// Most streams that a node's membership has open by its own wish, beside those to seeds and for
/// admissions.
pub const SYNC_DIALS_MAX: usize = 16;

/// Most answers in one protocol period to pings of nodes that are no present members: enough for a
/// burst of newcomers, too few to be a weapon against a forged source.
pub const STRANGER_REPLIES_MAX: u32 = 64;

const _: () = assert!(
    ADMISSION_WAIT.as_millis() < RESPONSE_TIMEOUT.as_millis(),
    "a newcomer still listens when its admission is decided"
);
const _: () = assert!(
    2 * (NAME_BYTES_MAX + 1) + 9 + 5 + (1 + 16 + 3) + 2 * MEMBER_BYTES_MAX
        < DATAGRAM_BODY_BYTES_MAX,
    "the largest request carries the receiver's record and the sender's"
);

/// Most points of one member on the hash ring: past this they cost memory and even out nothing.
pub const VIRTUAL_NODES_MAX: u32 = 4_096;

/// Most leases that an observer follows: those of a full member table.
pub const LEASES_MAX: usize = MEMBERS_MAX;

/// Most claims without memory that are remembered from one listing to the next; the others wait
/// their turn, for those that are readopted leave the list.
pub const ORPHANS_MAX: usize = 4_096;

/// How long no claim is sent after one failed; doubles with each further failure.
pub const CLAIM_BACKOFF: Duration = Duration::from_millis(250);

/// That pause grows no longer than this: a store that is back is found within it.
pub const CLAIM_BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Most clients of a pass file: each takes a row of 256 bytes and a range of slots.
pub const PASS_CLIENTS_MAX: u32 = 256;

/// Fewest and most slots of a client's range, which are the passes that it can have under way. The
/// fewest are one word of completions; the most keep a collector's look at them under a microsecond.
pub const PASS_CLIENT_SLOTS_MIN: u32 = 64;
/// See [`PASS_CLIENT_SLOTS_MIN`].
pub const PASS_CLIENT_SLOTS_MAX: u32 = 4_096;

/// Most slots of all clients together: what the fencing token has bits for.
pub const PASS_SLOTS_MAX: u32 = 1 << 18;

/// Most workers of a pass file: more threads than a machine has processors gain nothing.
pub const PASS_WORKERS_MAX: u32 = 1_024;

/// A payload, of arguments or of a result, is shorter than this many bytes: what the words that
/// describe a call and a reply count, with a bit to spare.
pub const PASS_PAYLOAD_BYTES_END: usize = 1 << 19;

/// Closures that may be known in one pass file. A worker's row has a bit for each.
pub const PASS_CLOSURES_MAX: usize = 256;

/// Longest name of a worker, a client or a closure in a pass file, in bytes of UTF-8; longer ones
/// are cut. Shorter than [`NAME_BYTES_MAX`], so that a row is a line.
pub const PASS_NAME_BYTES_MAX: usize = 48;

/// How often clients and workers look at the slots themselves, for what nobody announced, and how long
/// they sleep at most: what one step left undone by a killed process is late by.
pub const PASS_LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often hearts beat, how often a watchdog looks at them, and at every lock and slot.
pub const PASS_BEAT_EVERY: Duration = Duration::from_millis(100);
/// See [`PASS_BEAT_EVERY`].
pub const PASS_WATCH_EVERY: Duration = Duration::from_millis(50);
/// See [`PASS_BEAT_EVERY`].
pub const PASS_TEND_EVERY: Duration = Duration::from_secs(1);

/// How long a heart stands still, by default, before its lock is looked at.
pub const PASS_GRACE: Duration = Duration::from_millis(300);

const _: () = assert!(
    PASS_GRACE.as_millis() >= 2 * PASS_BEAT_EVERY.as_millis() + 2 * PASS_WATCH_EVERY.as_millis(),
    "a heart that missed one beat is not looked at"
);

/// Most times that a pass is begun: what the slot's word counts.
pub const PASS_ATTEMPTS_MAX: u8 = 63;

const _: () = assert!(
    PASS_SLOTS_MAX >= 64 * PASS_CLIENT_SLOTS_MAX,
    "64 clients can have the widest range, and so can the default 16"
);
const _: () = assert!(
    PASS_CLIENTS_MAX * PASS_CLIENT_SLOTS_MIN <= PASS_SLOTS_MAX,
    "all clients can have the narrowest range"
);
const _: () =
    assert!(PASS_NAME_BYTES_MAX <= NAME_BYTES_MAX && PASS_NAME_BYTES_MAX.is_multiple_of(8));
