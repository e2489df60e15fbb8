//! What members ask of their surroundings, and what they count.

use std::net::SocketAddr;

use crate::id::Generation;
use crate::load::LoadReport;
use crate::swim::{Answer, Ask, Changed, MembershipEvent};
use crate::wire::stream::StreamError;

/// Where a stream goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// As the operator wrote it: a host name or address, with a port.
    Seed(String),
    /// A member's gossip port.
    Addr(SocketAddr),
}

/// Why a dial brought no answer. Nothing is known of the other side's state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The name has no address.
    #[error("the name does not resolve: {0}")]
    Unresolved(String),
    /// No connection.
    #[error("no connection: {0}")]
    Unreachable(String),
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// The peer closed the stream before it answered.
    #[error("the peer closed the stream")]
    Closed,
    /// The peer said something that has no place here.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// What members ask of their surroundings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Tell the detector.
    Changed(Changed),
    /// Tell subscribers.
    Event(MembershipEvent),
    /// A present member's load is news.
    Load(LoadReport),
    /// Ask this by stream; answer with [`Members::handle_answer`](crate::swim::Members::handle_answer).
    Dial {
        /// Names the request in the answer.
        id: u64,
        /// Whom.
        to: Target,
        /// What.
        ask: Ask,
    },
    /// Answer a peer's request.
    Answer {
        /// As [`Members::handle_ask`](crate::swim::Members::handle_ask) was told.
        id: u64,
        /// The answer.
        answer: Answer,
    },
    /// Close a peer's request without an answer; it will ask again.
    Decline {
        /// As [`Members::handle_ask`](crate::swim::Members::handle_ask) was told.
        id: u64,
    },
    /// The mesh knows a boot of this name that is not older: register at least this generation and
    /// call [`Members::set_generation`](crate::swim::Members::set_generation).
    GenerationTooLow {
        /// The lowest that will do.
        at_least: Generation,
    },
    /// A newer boot of this name lives: this one must stop. Nothing follows.
    Fenced {
        /// The newer boot.
        by: Generation,
    },
    /// A member has admitted this boot.
    Joined,
    /// A live node has this name: this one must stop. Nothing follows.
    Refused {
        /// Where it answered.
        holder: SocketAddr,
    },
    /// A seed does not answer. Told once an outage; it is tried again for ever.
    SeedUnreachable {
        /// As the operator wrote it.
        seed: String,
        /// Why.
        error: DialError,
    },
}

/// What members have counted since they were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Times that this node refuted an accusation.
    pub refutations: u64,
    /// Records that no member could have: no usable address.
    pub records_unusable: u64,
    /// Records and newcomers turned away because the table is full of present members.
    pub table_full: u64,
    /// State exchanges that brought an answer.
    pub syncs: u64,
    /// Newcomers that were told that their name is taken.
    pub newcomers_refused: u64,
    /// Seeds over the bound, which are never dialled.
    pub seeds_ignored: u64,
}
