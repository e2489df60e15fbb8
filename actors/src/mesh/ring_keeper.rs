//! `RingKeeper`: carries the hash ring.
//!
//! Owns the ring of present members. Receives [`MembershipChanged`] from the membership store,
//! [`OwnerOf`] from anyone. Publishes an `Arc` snapshot, and sends nothing. On death the node stops.

use std::sync::Arc;

use actix::prelude::*;
use arc_swap::ArcSwap;
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::NodeId;

use crate::metrics::Metrics;
use crate::subscribers::MembershipChanged;

/// Which member does this key belong to?
#[derive(Message)]
#[rtype(result = "Option<NodeId>")]
pub struct OwnerOf(pub String);

/// The actor.
pub struct RingKeeper {
    ring: Arc<ArcSwap<HashRing>>,
    metrics: Arc<Metrics>,
}

impl RingKeeper {
    /// An actor that publishes in `ring`, and begins with what is there.
    pub fn new(ring: Arc<ArcSwap<HashRing>>, metrics: Arc<Metrics>) -> Self {
        Self { ring, metrics }
    }
}

impl Actor for RingKeeper {
    type Context = Context<Self>;
}

impl Handler<MembershipChanged> for RingKeeper {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, _: &mut Self::Context) {
        if let Some(next) = self.ring.load().apply(&event) {
            self.ring.store(Arc::new(next));
            self.metrics.ring_recalculations.increment();
        }
    }
}

impl Handler<OwnerOf> for RingKeeper {
    type Result = Option<NodeId>;

    fn handle(&mut self, OwnerOf(key): OwnerOf, _: &mut Self::Context) -> Self::Result {
        self.ring.load().owner_of(&key).cloned()
    }
}
