//! `RingKeeper`: carries the hash ring.
//!
//! Owns the ring of present members. Receives [`MembershipChanged`] from the membership store,
//! [`OwnerOf`] from anyone. Publishes an `Arc` snapshot, and sends [`HashRingChanged`] to those who
//! follow. On death the node stops.

use std::sync::Arc;

use actix::prelude::*;
use arc_swap::ArcSwap;
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::NodeId;
use meshwork_protocol::swim::MembershipEvent;

use crate::metrics::Metrics;
use crate::subscribers::MembershipChanged;

/// Which member does this key belong to?
#[derive(Message)]
#[rtype(result = "Option<NodeId>")]
pub struct OwnerOf(pub String);

/// Keys may have moved; the snapshot is new.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct HashRingChanged {
    /// The event that it follows from.
    pub epoch: u64,
}

/// Whom the keeper tells.
pub struct Peers {
    /// Those who follow the ring.
    pub followers: Vec<Recipient<HashRingChanged>>,
}

/// The actor.
pub struct RingKeeper {
    ring: Arc<ArcSwap<HashRing>>,
    virtual_nodes: u32,
    metrics: Arc<Metrics>,
    peers: Peers,
}

impl RingKeeper {
    /// An actor that publishes in `ring`.
    pub fn new(
        ring: Arc<ArcSwap<HashRing>>,
        virtual_nodes: u32,
        metrics: Arc<Metrics>,
        peers: Peers,
    ) -> Self {
        Self { ring, virtual_nodes, metrics, peers }
    }
}

impl Actor for RingKeeper {
    type Context = Context<Self>;
}

impl Handler<MembershipChanged> for RingKeeper {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, _: &mut Self::Context) {
        let ring = self.ring.load();
        let next = match &event {
            MembershipEvent::Snapshot { members, .. } => {
                HashRing::from_members(members.iter().map(|m| m.id.clone()), self.virtual_nodes)
            }
            MembershipEvent::Joined { member, .. } => ring.with_member(&member.id),
            MembershipEvent::Died { member, .. } | MembershipEvent::Left { member, .. } => {
                ring.without_member(&member.id)
            }
            // A suspect keeps its keys, and an address is not part of the ring.
            _ => return,
        };
        self.ring.store(Arc::new(next));
        self.metrics.ring_recalculations.increment();
        for follower in &self.peers.followers {
            follower.do_send(HashRingChanged { epoch: event.epoch() });
        }
    }
}

impl Handler<OwnerOf> for RingKeeper {
    type Result = Option<NodeId>;

    fn handle(&mut self, OwnerOf(key): OwnerOf, _: &mut Self::Context) -> Self::Result {
        self.ring.load().owner_of(&key).cloned()
    }
}
