//! SWIM membership as two machines joined by their messages.
//!
//! [`Detector`] probes, times out, spreads news and answers pings; it holds only what it needs to
//! choose whom to probe. [`Members`] holds the table: precedence, refutation, joins, state exchange.
//! Neither calls the other. What one tells the other ([`Heard`], [`Verdict`], [`Changed`]) is queued
//! and delayed like any message, as it is between two actors; [`node::Node`] joins them for
//! simulation and tests.
//!
//! Sources: Das, Gupta, Motivala, *SWIM* (DSN 2002); Dadgar, Phillips, Currey, *Lifeguard* (DSN-W
//! 2018).

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::id::{Generation, Incarnation, NodeId};
use crate::load::LoadReport;

pub mod config;
pub mod detector;
pub mod dissemination;
pub mod health;
pub mod members;
pub mod node;
pub mod suspicion;
mod sync;
mod table;

pub use config::{ConfigError, SwimConfig};
pub use detector::Detector;
pub use members::Members;

/// A member as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub id: NodeId,
    /// Its boot.
    pub generation: Generation,
    /// Its refutation counter within the boot.
    pub incarnation: Incarnation,
    /// Whether it is thought to live.
    pub state: MemberState,
    /// Where it takes datagrams and, by TCP, joins and state exchanges.
    pub gossip: SocketAddr,
    /// Where it takes steal requests.
    pub steal: SocketAddr,
}

impl Member {
    /// What decides between two records of one id: the greater wins.
    ///
    /// Generation, then incarnation, then severity. The address is a part of the boot: two nodes
    /// that were given one generation by two stores are two boots, and one order must hold
    /// everywhere for tables to converge.
    pub fn precedence(&self) -> (Boot, Incarnation, MemberState) {
        (self.boot(), self.incarnation, self.state)
    }

    /// Which run of the node this is.
    pub fn boot(&self) -> Boot {
        Boot { generation: self.generation, gossip: self.gossip }
    }

    /// Whether it is thought to take part: alive or suspect.
    pub fn is_present(&self) -> bool {
        matches!(self.state, MemberState::Alive | MemberState::Suspect)
    }
}

/// One run of a node, among all that ever had its name: the greater is the newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Boot {
    /// Its generation.
    pub generation: Generation,
    /// Where it takes datagrams.
    pub gossip: SocketAddr,
}

/// What a member is thought to be, by severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// It answers.
    Alive,
    /// It did not answer a probe; it may refute.
    Suspect,
    /// It did not refute in time. It is off the hash ring.
    Dead,
    /// It said goodbye. It is never redialled.
    Left,
}

impl MemberState {
    /// Its name, as tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::Dead => "dead",
            Self::Left => "left",
        }
    }
}

/// Detector to members: what datagrams said of members and loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Records, as received.
    pub updates: Vec<Member>,
    /// Loads, as received.
    pub loads: Vec<LoadReport>,
}

/// Detector to members: what a probe or a suspicion's end says of a member. It applies only to the
/// exact record that was probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whom.
    pub id: NodeId,
    /// The generation that was probed.
    pub generation: Generation,
    /// The incarnation that was probed.
    pub incarnation: Incarnation,
    /// `Suspect` after a failed probe, `Dead` after a suspicion that nobody refuted.
    pub state: MemberState,
}

/// Members to detector: records that changed. Each is to be spread; the detector takes its list of
/// whom to probe from them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// The new records, own ones included.
    pub members: Vec<Member>,
    /// Ids whose tombstones were dropped: nothing of them is kept.
    pub forgotten: Vec<NodeId>,
}

/// What is asked of a peer's gossip port by stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Admit me.
    Join {
        /// The newcomer's record.
        me: Member,
    },
    /// Take my table, give me yours.
    Sync {
        /// The asker's table.
        members: Vec<Member>,
    },
    /// Are you there?
    Ping,
}

/// The answer to an [`Ask`]. Who answers is in the stream's greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a join or a sync.
    State {
        /// The answerer's table.
        members: Vec<Member>,
        /// The highest generation that the answerer knows for the asker's id, tombstones included.
        highest: Option<Generation>,
    },
    /// To a join: a live node has this id.
    Refused {
        /// Where it answered.
        holder: SocketAddr,
    },
    /// To a ping.
    Pong,
}

/// Something that happened to the membership, for those who subscribe.
///
/// The first event of a subscription is a [`MembershipEvent::Snapshot`]; each later one has an epoch
/// one greater than the one before. A subscriber that could not keep up gets a fresh snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum MembershipEvent {
    /// Who is present (alive or suspect, this node included) as of `epoch`.
    Snapshot {
        /// The number of the last event that this snapshot includes.
        epoch: u64,
        /// The present members, by id.
        members: Arc<[Member]>,
    },
    /// A member is new, or came back after it was dead or gone.
    Joined {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
    /// A present member has a new address or a new generation.
    Updated {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
    /// A member did not answer.
    Suspected {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
    /// A suspect refuted.
    Recovered {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
    /// A suspect did not refute in time.
    Died {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
    /// A member said goodbye.
    Left {
        /// The event's number.
        epoch: u64,
        /// The record now.
        member: Member,
    },
}

impl MembershipEvent {
    /// The event's number.
    pub fn epoch(&self) -> u64 {
        match self {
            Self::Snapshot { epoch, .. }
            | Self::Joined { epoch, .. }
            | Self::Updated { epoch, .. }
            | Self::Suspected { epoch, .. }
            | Self::Recovered { epoch, .. }
            | Self::Died { epoch, .. }
            | Self::Left { epoch, .. } => *epoch,
        }
    }

    /// The member that it is about; none for a snapshot.
    pub fn member(&self) -> Option<&Member> {
        match self {
            Self::Snapshot { .. } => None,
            Self::Joined { member, .. }
            | Self::Updated { member, .. }
            | Self::Suspected { member, .. }
            | Self::Recovered { member, .. }
            | Self::Died { member, .. }
            | Self::Left { member, .. } => Some(member),
        }
    }
}
