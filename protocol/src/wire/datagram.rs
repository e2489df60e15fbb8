//! Datagrams: the clear header, the message, and the writer that fills it up to its budget.
//!
//! `magic u16 | version u8 | key id u8 | mesh id u32 | message`, all big-endian. Key id 0 means that
//! the message is not sealed. A node drops, and counts, whatever is not for it.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::id::{Generation, JobId, NodeId};
use crate::limits::{
    DATAGRAM_BODY_BYTES_MAX, DATAGRAM_BYTES_MAX, DATAGRAM_DECODE_BYTES_MAX, DATAGRAM_HEADER_BYTES,
    DATAGRAM_ITEMS_MAX, FINISHED_IDS_MAX,
};
use crate::load::LoadReport;
use crate::swim::Member;
use crate::wire::codec::{self, DecodeError};

/// The first two bytes of everything that meshwork sends: "mw".
pub const MAGIC: u16 = 0x6d77;
/// The version of the wire.
pub const VERSION: u8 = 1;

/// The mesh that a message belongs to: the low half of a hash of the mesh's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MeshId(pub u32);

impl MeshId {
    /// The id of the mesh called `name`.
    pub fn of(name: &str) -> Self {
        let hash = xxhash_rust::xxh3::xxh3_64(name.as_bytes());
        Self((hash & u64::from(u32::MAX)) as u32)
    }
}

/// Who sent a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sender {
    /// The node.
    pub node: NodeId,
    /// Its boot.
    pub generation: Generation,
}

/// A datagram between nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// Who sent it.
    pub from: Sender,
    /// What it is about.
    pub body: Body,
    /// News of members, most urgent first.
    #[serde(deserialize_with = "codec::bounded::<DATAGRAM_ITEMS_MAX, _, _>")]
    pub updates: Vec<Member>,
    /// Loads, the sender's own first.
    #[serde(deserialize_with = "codec::bounded::<DATAGRAM_ITEMS_MAX, _, _>")]
    pub loads: Vec<LoadReport>,
}

/// What a datagram is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Body {
    /// Are you there? Only `to` answers: an address may have a new tenant.
    Ping {
        /// Repeated in the answer.
        seq: u32,
        /// Who is meant.
        to: NodeId,
    },
    /// I am.
    Ack {
        /// Of the ping.
        seq: u32,
    },
    /// To the node that asked for an indirect probe: no answer so far.
    Nack {
        /// Of the request.
        seq: u32,
    },
    /// Please ping `target` for me.
    PingReq {
        /// Repeated in the answer.
        seq: u32,
        /// Whom.
        target: NodeId,
        /// Where.
        addr: SocketAddr,
    },
    /// The answer of `target` to an indirect probe, relayed.
    AckRelay {
        /// Of the request.
        seq: u32,
        /// Who answered.
        target: Sender,
    },
    /// I leave, and shall not be missed. My record is among the updates.
    Leave,
    /// The store has jobs for you.
    Nudge,
    /// You asked for work when I had none; now I have.
    SurplusHint {
        /// How many jobs I could give.
        stealable: u32,
    },
    /// These jobs, which you accepted, have ended; the store has their outcomes.
    Finished {
        /// At most [`FINISHED_IDS_MAX`].
        #[serde(deserialize_with = "codec::bounded::<FINISHED_IDS_MAX, _, _>")]
        jobs: Vec<JobId>,
    },
}

/// Why bytes are not a datagram for this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    /// It is not meshwork's.
    #[error("not a meshwork datagram")]
    Foreign,
    /// It is of another version.
    #[error("wire version {0}, this node speaks {VERSION}")]
    Version(u8),
    /// It is sealed, or sealed with a key that this node does not have.
    #[error("key id {0} is unknown here")]
    Key(u8),
    /// It belongs to another mesh.
    #[error("it belongs to another mesh")]
    OtherMesh,
    /// The message does not decode.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// Puts the clear header before a message.
///
/// # Panics
/// When the whole would exceed [`DATAGRAM_BYTES_MAX`]: a [`Writer`] never makes such a message.
pub fn seal(mesh: MeshId, message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(DATAGRAM_HEADER_BYTES + message.len());
    bytes.extend_from_slice(&MAGIC.to_be_bytes());
    bytes.push(VERSION);
    bytes.push(0);
    bytes.extend_from_slice(&mesh.0.to_be_bytes());
    bytes.extend_from_slice(message);
    assert!(bytes.len() <= DATAGRAM_BYTES_MAX, "a datagram of {} bytes", bytes.len());
    bytes
}

/// Checks the clear header and decodes the message.
///
/// # Errors
/// [`DatagramError`]; the bytes are then to be dropped.
pub fn open(mesh: MeshId, bytes: &[u8]) -> Result<Datagram, DatagramError> {
    let Some((header, message)) = bytes.split_at_checked(DATAGRAM_HEADER_BYTES) else {
        return Err(DatagramError::Foreign);
    };
    if header[..2] != MAGIC.to_be_bytes() {
        return Err(DatagramError::Foreign);
    }
    if header[2] != VERSION {
        return Err(DatagramError::Version(header[2]));
    }
    if header[3] != 0 {
        return Err(DatagramError::Key(header[3]));
    }
    if header[4..8] != mesh.0.to_be_bytes() {
        return Err(DatagramError::OtherMesh);
    }
    Ok(codec::decode::<Datagram, DATAGRAM_DECODE_BYTES_MAX>(message)?)
}

/// Fills a datagram up to its budget, measuring each part before it goes in.
#[derive(Debug)]
pub struct Writer {
    datagram: Datagram,
    left: usize,
}

impl Writer {
    /// A datagram with its body and nothing else yet.
    ///
    /// # Panics
    /// When the body alone exceeds the budget, which no body within its documented bounds does.
    pub fn new(from: Sender, body: Body) -> Self {
        let datagram = Datagram { from, body, updates: Vec::new(), loads: Vec::new() };
        // Fewer than 251 items fit, so the counts keep the byte that each has now.
        let left = DATAGRAM_BODY_BYTES_MAX.checked_sub(codec::encoded_len(&datagram));
        Self { datagram, left: left.expect("a body fits a datagram") }
    }

    /// Adds news of a member, if it fits; returns whether it did.
    pub fn update(&mut self, member: &Member) -> bool {
        let fits = self.take(codec::encoded_len(member));
        if fits {
            self.datagram.updates.push(member.clone());
        }
        fits
    }

    /// Adds a load, if it fits; returns whether it did.
    pub fn load(&mut self, report: &LoadReport) -> bool {
        let fits = self.take(codec::encoded_len(report));
        if fits {
            self.datagram.loads.push(report.clone());
        }
        fits
    }

    fn take(&mut self, bytes: usize) -> bool {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    /// Bytes still free.
    pub fn left(&self) -> usize {
        self.left
    }

    /// The encoded message, at most [`DATAGRAM_BODY_BYTES_MAX`] bytes.
    pub fn finish(self) -> Vec<u8> {
        let bytes = codec::encode(&self.datagram);
        debug_assert!(bytes.len() <= DATAGRAM_BODY_BYTES_MAX);
        bytes
    }
}
