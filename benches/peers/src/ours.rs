//! Our half: the same scenarios on meshwork.
//!
//! `converge` and `steal` wait for the embedding API; until then they are errors, never figures.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use arc_swap::ArcSwap;
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::NodeId;

use crate::hash_ring::{Ring, VIRTUAL_NODES};

/// Time from the moment the seed has started, when the others begin to start, until every one of
/// `nodes` nodes sees all the others alive; `None` when that took longer than
/// [`CONVERGE_LIMIT`](crate::scenario::CONVERGE_LIMIT).
///
/// As for the peer: all nodes in this process, node 0 the only seed of the others, a period of
/// [`PERIOD`](crate::scenario::PERIOD), the others started together and not one after the other,
/// the nodes looked at through [`wait_until`](crate::scenario::wait_until), all of them stopped
/// and their ports free at the end.
pub(crate) fn converge(_nodes: usize) -> anyhow::Result<Option<Duration>> {
    bail!("our nodes are not connected yet: try --peer-only")
}

/// What our nodes did with the work of one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StealOutcome {
    /// Jobs that moved to another node.
    pub(crate) stolen: u64,
    /// Time from the enqueue of the first job until no node held (buffered or running) so few
    /// jobs that it would still steal; `None` when that took longer than
    /// [`STEAL_WINDOW`](crate::scenario::STEAL_WINDOW).
    pub(crate) level: Option<Duration>,
}

/// Puts [`STEAL_JOBS`](crate::scenario::STEAL_JOBS) jobs without a key on one of
/// [`STEAL_NODES`](crate::scenario::STEAL_NODES) converged nodes, whose buffer holds them all.
///
/// As for the peer: no job finishes before the outcome is taken, so only a steal moves one, and
/// no node may get one by claiming it from the store.
pub(crate) fn steal() -> anyhow::Result<StealOutcome> {
    bail!("our nodes are not connected yet: try --peer-only")
}

/// Our hash ring of `names`.
pub(crate) fn hash_ring(names: &[String]) -> anyhow::Result<Box<dyn Ring>> {
    let ids = names.iter().map(NodeId::new).collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(Published(ArcSwap::from_pointee(HashRing::from_members(ids, VIRTUAL_NODES)))))
}

/// Our hash ring: a snapshot that readers share, replaced by the next at every change.
struct Published(ArcSwap<HashRing>);

impl Ring for Published {
    fn look_up(&self, keys: &[String]) {
        let ring = self.0.load();
        for key in keys {
            black_box(ring.owner_of(black_box(key)));
        }
    }

    fn join_and_leave(&mut self, newcomer: &str) {
        let newcomer = NodeId::new(black_box(newcomer)).expect("the benchmark's names are names");
        let joined = self.0.load().with_member(&newcomer);
        self.0.store(Arc::new(joined));
        let left = self.0.load().without_member(&newcomer);
        self.0.store(Arc::new(left));
    }
}
