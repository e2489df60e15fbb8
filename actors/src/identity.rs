//! Who this node is, as all its actors see it.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use meshwork_protocol::id::{Generation, NodeId, Owner};
use meshwork_protocol::time::Instant;
use meshwork_protocol::wire::datagram::{MeshId, Sender};

/// Until when a generation's claims hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// What the claims were made under.
    pub generation: Generation,
    /// When they are no longer this node's, unless the lease is renewed.
    pub deadline: Instant,
}

/// The node's name, and its present lease.
#[derive(Debug)]
pub struct Identity {
    /// The mesh it belongs to.
    pub mesh: MeshId,
    /// Its name.
    pub node: NodeId,
    gossip: SocketAddr,
    /// Both parts change at once: a new generation without its deadline would end its first handlers
    /// before they began.
    lease: ArcSwap<Lease>,
}

impl Identity {
    /// The identity of a node that was registered. There is none before: whoever has it may run jobs.
    pub fn new(mesh: MeshId, node: NodeId, gossip: SocketAddr, lease: Lease) -> Self {
        Self { mesh, node, gossip, lease: ArcSwap::from_pointee(lease) }
    }

    /// Where others find it.
    pub fn gossip(&self) -> SocketAddr {
        self.gossip
    }

    /// The present generation. It changes when the lease was lost and a new one was registered.
    pub fn generation(&self) -> Generation {
        self.lease.load().generation
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
    pub fn lease_holds(&self, generation: Generation, now: Instant) -> bool {
        let lease = self.lease.load();
        lease.generation == generation && now < lease.deadline
    }

    /// A lease was granted or renewed. Only its keeper sets it.
    pub fn set_lease(&self, lease: Lease) {
        self.lease.store(Arc::new(lease));
    }

    /// The present lease is over at once. Only its keeper ends it, or a drain when no handler is left.
    pub fn end_lease(&self) {
        self.set_lease(Lease { generation: self.generation(), deadline: Instant::ZERO });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_holds_for_its_generation_until_its_deadline() {
        let [at_1, at_2, at_3] = [1, 2, 3].map(Instant::from_micros);
        let lease = |generation, deadline| Lease { generation: Generation(generation), deadline };
        let node = NodeId::new("node").unwrap();
        let mesh = MeshId::of("mesh");
        let me = Identity::new(mesh, node, ([127, 0, 0, 1], 1).into(), lease(7, at_2));
        let holds = |generation, now| me.lease_holds(Generation(generation), now);
        assert!(holds(7, at_1), "from the first moment");
        assert!(!holds(7, at_2) && !holds(6, at_1) && !holds(8, at_1));
        me.set_lease(lease(8, at_3));
        assert!(holds(8, at_2) && !holds(7, at_1));
        me.end_lease();
        assert!(!holds(8, at_1));
        assert_eq!(me.generation(), Generation(8));
    }
}
