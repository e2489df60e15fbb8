//! Who this node is, as all its actors see it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use meshwork_protocol::id::{Generation, NodeId, Owner};
use meshwork_protocol::time::Instant;
use meshwork_protocol::wire::datagram::{MeshId, Sender};

/// The node's name, its present generation, and until when that generation's claims hold.
#[derive(Debug)]
pub struct Identity {
    /// The mesh it belongs to.
    pub mesh: MeshId,
    /// Its name.
    pub node: NodeId,
    gossip: SocketAddr,
    generation: AtomicU64,
    lease_deadline_us: AtomicU64,
}

impl Identity {
    /// The identity of a node that has no lease yet.
    pub fn new(mesh: MeshId, node: NodeId, gossip: SocketAddr, generation: Generation) -> Self {
        Self {
            mesh,
            node,
            gossip,
            generation: AtomicU64::new(generation.0),
            lease_deadline_us: AtomicU64::new(0),
        }
    }

    /// Where others find it.
    pub fn gossip(&self) -> SocketAddr {
        self.gossip
    }

    /// The present generation. It changes when the lease was lost and a new one was registered.
    pub fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::Acquire))
    }

    /// Only the keeper of the lease sets it.
    pub fn set_generation(&self, generation: Generation) {
        self.generation.store(generation.0, Ordering::Release);
    }

    /// What owns this node's claims now.
    pub fn owner(&self) -> Owner {
        Owner { node: self.node.clone(), generation: self.generation() }
    }

    /// How this node signs what it sends.
    pub fn sender(&self) -> Sender {
        Sender { node: self.node.clone(), generation: self.generation() }
    }

    /// Whether claims of `generation` still hold at `now`. Read before every poll of a handler.
    ///
    /// The deadline is read first: one that belongs to a newer generation was published after that
    /// generation was, and so is seen with it.
    pub fn lease_holds(&self, generation: Generation, now: Instant) -> bool {
        let deadline = self.lease_deadline_us.load(Ordering::Acquire);
        now.as_micros() < deadline && self.generation() == generation
    }

    /// Only the keeper of the lease sets it.
    pub fn set_lease_deadline(&self, deadline: Instant) {
        self.lease_deadline_us.store(deadline.as_micros(), Ordering::Release);
    }
}
