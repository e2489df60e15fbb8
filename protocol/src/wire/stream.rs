//! Streams: length-prefixed frames on the gossip port (join, state exchange, stream ping) and on
//! the steal port.
//!
//! A frame is a 4-byte big-endian length and that many bytes, at most [`FRAME_BYTES_MAX`]. The first
//! frame each way is a [`Hello`].

use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::id::{Generation, JobId};
use crate::job::{Claim, ClaimedJob};
use crate::limits::{
    FRAME_BYTES_MAX, FRAME_DECODE_BYTES_MAX, MEMBERS_MAX, STATE_CHUNK_MEMBERS_MAX, STEAL_BATCH_MAX,
};
use crate::load::{Load, LoadReport};
use crate::swim::{Answer, Ask, Member};
use crate::wire::codec::{self, DecodeError};
use crate::wire::datagram::{MAGIC, MeshId, Sender, VERSION};

/// Bytes of the length before each frame.
pub const FRAME_HEADER_BYTES: usize = 4;

/// Why a stream is broken. It is then closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A frame is longer than allowed.
    #[error("a frame of {0} bytes, at most {FRAME_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// The other side is not meshwork.
    #[error("the peer does not speak meshwork")]
    Foreign,
    /// The other side speaks another version.
    #[error("the peer speaks wire version {0}, this node {VERSION}")]
    Version(u8),
    /// The other side is of another mesh.
    #[error("the peer belongs to another mesh")]
    OtherMesh,
    /// A frame does not decode.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A frame decodes but has no place here.
    #[error("unexpected message: {0}")]
    Unexpected(&'static str),
}

/// The first frame each way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    magic: u16,
    version: u8,
    mesh: MeshId,
    /// Who speaks.
    pub from: Sender,
}

impl Hello {
    /// This node's greeting.
    pub fn new(mesh: MeshId, from: Sender) -> Self {
        Self { magic: MAGIC, version: VERSION, mesh, from }
    }

    /// Checks a peer's greeting.
    ///
    /// # Errors
    /// [`StreamError`] when the peer is not of this mesh.
    pub fn accept(self, mesh: MeshId) -> Result<Sender, StreamError> {
        if self.magic != MAGIC {
            Err(StreamError::Foreign)
        } else if self.version != VERSION {
            Err(StreamError::Version(self.version))
        } else if self.mesh != mesh {
            Err(StreamError::OtherMesh)
        } else {
            Ok(self.from)
        }
    }
}

/// A frame on the gossip port, after the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GossipFrame {
    /// The newcomer's own record.
    Join(Member),
    /// The sender's state follows, in chunks.
    Sync,
    /// A part of a member table.
    Chunk {
        /// At most [`STATE_CHUNK_MEMBERS_MAX`].
        #[serde(deserialize_with = "codec::bounded::<STATE_CHUNK_MEMBERS_MAX, _, _>")]
        members: Vec<Member>,
        /// Whether no other chunk follows.
        last: bool,
    },
    /// Ends a table sent as an answer.
    End {
        /// The highest generation known for the asker's id.
        highest: Option<Generation>,
    },
    /// The newcomer is not admitted: a live node has its id.
    Refused {
        /// Where that node answers.
        holder: SocketAddr,
    },
    /// Are you there, by stream?
    Ping,
    /// I am; the greeting said who.
    Pong,
}

/// A frame on the steal port, after the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StealFrame {
    /// Give me up to `max` jobs.
    Request {
        /// Counts the thief's requests on this connection; repeated in the answer.
        seq: u32,
        /// The thief's room.
        max: u32,
        /// How busy the thief is: the victim gives what evens the two out.
        load: Load,
    },
    /// These jobs are yours if you transfer them in the store before the offer expires.
    Offer(Offer),
    /// I transferred these; the others are yours again.
    Settle {
        /// Which offer.
        offer: u64,
        /// The jobs that the thief got, at most [`STEAL_BATCH_MAX`].
        #[serde(deserialize_with = "codec::bounded::<STEAL_BATCH_MAX, _, _>")]
        taken: Vec<JobId>,
    },
}

/// A victim's answer to a request; an empty one makes the victim a lifeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Of the request.
    pub seq: u32,
    /// Names the offer in the settlement; unique for the victim's generation.
    pub offer: u64,
    /// How long it stands, in milliseconds from its sending.
    pub expires_ms: u32,
    /// What is offered, at most [`STEAL_BATCH_MAX`].
    #[serde(deserialize_with = "codec::bounded::<STEAL_BATCH_MAX, _, _>")]
    pub jobs: Vec<OfferedJob>,
    /// The victim's load after this offer.
    pub load: Option<LoadReport>,
}

/// One job of an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OfferedJob {
    /// The whole job.
    Whole(ClaimedJob),
    /// Its claim; the thief reads the rest from the store.
    Named(Claim),
}

impl OfferedJob {
    /// The claim that is offered.
    pub fn claim(&self) -> Claim {
        match self {
            Self::Whole(job) => job.claim(),
            Self::Named(claim) => *claim,
        }
    }
}

/// The frame of `message`: length and payload.
///
/// # Errors
/// [`StreamError::TooLong`] when it would exceed [`FRAME_BYTES_MAX`]; nothing is to be sent then.
pub fn encode_frame<T: Serialize>(message: &T) -> Result<Vec<u8>, StreamError> {
    let payload = codec::encode(message);
    if payload.len() > FRAME_BYTES_MAX {
        return Err(StreamError::TooLong(payload.len()));
    }
    let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + payload.len());
    let length = u32::try_from(payload.len()).expect("FRAME_BYTES_MAX fits 32 bits");
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&payload);
    Ok(frame)
}

/// The length that a frame's first four bytes announce.
///
/// # Errors
/// [`StreamError::TooLong`] before anything is allocated for it.
pub fn frame_len(header: [u8; FRAME_HEADER_BYTES]) -> Result<usize, StreamError> {
    let length = u32::from_be_bytes(header) as usize;
    if length > FRAME_BYTES_MAX { Err(StreamError::TooLong(length)) } else { Ok(length) }
}

/// The message in a frame's payload.
///
/// # Errors
/// [`StreamError::Decode`].
pub fn decode_frame<T: DeserializeOwned>(payload: &[u8]) -> Result<T, StreamError> {
    Ok(codec::decode::<T, FRAME_DECODE_BYTES_MAX>(payload)?)
}

/// The frames that carry `ask`, in order.
pub fn ask_frames(ask: &Ask) -> Vec<GossipFrame> {
    match ask {
        Ask::Join { me } => vec![GossipFrame::Join(me.clone())],
        Ask::Sync { members } => {
            let mut frames = vec![GossipFrame::Sync];
            push_chunks(&mut frames, members);
            frames
        }
        Ask::Ping => vec![GossipFrame::Ping],
    }
}

/// The frames that carry `answer`, in order.
pub fn answer_frames(answer: &Answer) -> Vec<GossipFrame> {
    match answer {
        Answer::State { members, highest } => {
            let mut frames = Vec::new();
            push_chunks(&mut frames, members);
            frames.push(GossipFrame::End { highest: *highest });
            frames
        }
        Answer::Refused { holder } => vec![GossipFrame::Refused { holder: *holder }],
        Answer::Pong => vec![GossipFrame::Pong],
    }
}

fn push_chunks(frames: &mut Vec<GossipFrame>, members: &[Member]) {
    let count = members.len().div_ceil(STATE_CHUNK_MEMBERS_MAX).max(1);
    for i in 0..count {
        let start = i * STATE_CHUNK_MEMBERS_MAX;
        let end = members.len().min(start + STATE_CHUNK_MEMBERS_MAX);
        let members = members[start..end].to_vec();
        frames.push(GossipFrame::Chunk { members, last: i + 1 == count });
    }
}

/// Puts an [`Ask`] together from its frames.
///
/// After an error, and after the ask is complete, every frame is refused.
#[derive(Debug, Default)]
pub struct AskReader(AskState);

#[derive(Debug, Default)]
enum AskState {
    #[default]
    Start,
    Table(Vec<Member>),
    Done,
}

impl AskReader {
    /// Takes the next frame; `Some` when the ask is complete.
    ///
    /// # Errors
    /// [`StreamError`] when the frame has no place here, or the table grows past [`MEMBERS_MAX`].
    pub fn frame(&mut self, frame: GossipFrame) -> Result<Option<Ask>, StreamError> {
        match (std::mem::replace(&mut self.0, AskState::Done), frame) {
            (AskState::Start, GossipFrame::Join(me)) => Ok(Some(Ask::Join { me })),
            (AskState::Start, GossipFrame::Ping) => Ok(Some(Ask::Ping)),
            (AskState::Start, GossipFrame::Sync) => {
                self.0 = AskState::Table(Vec::new());
                Ok(None)
            }
            (AskState::Table(table), GossipFrame::Chunk { members, last }) => {
                let members = extended(table, members, last)?;
                if last {
                    return Ok(Some(Ask::Sync { members }));
                }
                self.0 = AskState::Table(members);
                Ok(None)
            }
            _ => Err(StreamError::Unexpected("not a request")),
        }
    }
}

/// Puts an [`Answer`] together from its frames.
///
/// After an error, and after the answer is complete, every frame is refused.
#[derive(Debug, Default)]
pub struct AnswerReader(AnswerState);

#[derive(Debug, Default)]
enum AnswerState {
    #[default]
    Start,
    Table(Vec<Member>),
    /// The last chunk was read.
    Whole(Vec<Member>),
    Done,
}

impl AnswerReader {
    /// Takes the next frame; `Some` when the answer is complete.
    ///
    /// # Errors
    /// As [`AskReader::frame`].
    pub fn frame(&mut self, frame: GossipFrame) -> Result<Option<Answer>, StreamError> {
        let table = match (std::mem::replace(&mut self.0, AnswerState::Done), frame) {
            (AnswerState::Start, GossipFrame::Refused { holder }) => {
                return Ok(Some(Answer::Refused { holder }));
            }
            (AnswerState::Start, GossipFrame::Pong) => return Ok(Some(Answer::Pong)),
            (AnswerState::Whole(members), GossipFrame::End { highest }) => {
                return Ok(Some(Answer::State { members, highest }));
            }
            (AnswerState::Start, GossipFrame::Chunk { members, last }) => {
                (extended(Vec::new(), members, last)?, last)
            }
            (AnswerState::Table(table), GossipFrame::Chunk { members, last }) => {
                (extended(table, members, last)?, last)
            }
            _ => return Err(StreamError::Unexpected("not an answer")),
        };
        self.0 = match table {
            (members, true) => AnswerState::Whole(members),
            (members, false) => AnswerState::Table(members),
        };
        Ok(None)
    }
}

fn extended(
    mut table: Vec<Member>,
    members: Vec<Member>,
    last: bool,
) -> Result<Vec<Member>, StreamError> {
    if members.is_empty() && !last {
        // It would bring the end no nearer, and so never be too much.
        return Err(StreamError::Unexpected("an empty chunk before the last"));
    }
    if table.len() + members.len() > MEMBERS_MAX {
        return Err(StreamError::Unexpected("a member table over its bound"));
    }
    table.extend(members);
    Ok(table)
}
