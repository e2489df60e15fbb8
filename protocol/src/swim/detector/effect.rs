//! What the detector asks of its surroundings, and what it counts.

use std::net::SocketAddr;

use crate::id::NodeId;
use crate::swim::{Heard, Verdict};

/// What the detector asks of its surroundings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send this message, with the clear header before it, as one datagram.
    Transmit {
        /// Where to.
        to: SocketAddr,
        /// As [`Writer::finish`](crate::wire::datagram::Writer::finish) made it.
        message: Vec<u8>,
    },
    /// Tell members what was heard.
    Heard(Heard),
    /// Tell members what a probe or a suspicion came to.
    Verdict(Verdict),
    /// Ask [`Ask::Ping`](crate::swim::Ask::Ping) of the target by stream; answer with
    /// [`Detector::handle_stream_ping`](crate::swim::Detector::handle_stream_ping).
    StreamPing {
        /// Names the request in the answer.
        id: u64,
        /// Where to.
        to: SocketAddr,
        /// Who should answer.
        target: NodeId,
    },
}

/// What the detector has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Probes begun.
    pub probes: u64,
    /// Probes that the target answered, by whatever way.
    pub probes_answered: u64,
    /// Probes answered by stream alone: datagrams to that member are lost.
    pub probes_answered_by_stream: u64,
    /// Probes that ended in a verdict.
    pub probes_failed: u64,
    /// Rounds that accused nobody because this node's own timers were late.
    pub rounds_voided: u64,
    /// Pings meant for another id.
    pub pings_misaddressed: u64,
    /// Pings of strangers left unanswered because there were too many.
    pub stranger_replies_withheld: u64,
    /// Indirect probes not made: of a stranger, or too many at once.
    pub relays_refused: u64,
    /// Answers that no pending probe asked for.
    pub answers_unexpected: u64,
    /// Datagrams that came from this very boot.
    pub echoes: u64,
}
