//! Our half: the same scenarios on meshwork.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{Arbiter, System};
use anyhow::Context;
use arc_swap::ArcSwap;
use futures_util::future::{join_all, try_join_all};
use meshwork::actors::start::{Deaths, Running, Slot};
use meshwork::actors::store::memory::MemoryStore;
use meshwork::actors::store::messages::StoreHandle;
use meshwork::prelude::*;
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::NodeId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::hash_ring::{Ring, VIRTUAL_NODES};
use crate::scenario::{
    CONVERGE_LIMIT, PERIOD, STEAL_JOBS, STEAL_NODES, STEAL_WINDOW, node_name, wait_until,
};

/// At so many buffered jobs or fewer a node steals: our default.
const STEAL_THRESHOLD: u32 = 2;

/// A job that ends when it is told to.
#[derive(Serialize, Deserialize)]
struct Hold;

impl Job for Hold {
    const NAME: &'static str = "hold";
    type Output = ();
}

async fn hold(_: Hold, released: Data<watch::Receiver<bool>>) -> Result<(), JobError> {
    let mut released = watch::Receiver::clone(&released);
    released.wait_for(|released| *released).await?;
    Ok(())
}

/// Nodes of one process, on two threads of their own, with one store in memory.
struct Nodes {
    nodes: Vec<Mesh>,
    release: watch::Sender<bool>,
    store: Running,
    arbiters: [Arbiter; 2],
    /// When the others began to start: the seed was there already.
    begun: Instant,
}

impl Nodes {
    /// Node 0 first, then all others together, each with node 0 as its only seed.
    async fn start(count: usize) -> anyhow::Result<Self> {
        let arbiters = [Arbiter::new(), Arbiter::new()];
        let [control, work] = &arbiters;
        let (deaths, _) = Deaths::new();
        let slot = Slot::<MemoryStore>::new("MemoryStore", 4_096);
        let handle = StoreHandle::of(&slot.addr());
        let store = slot.start(&work.handle(), &deaths, |_| MemoryStore::default());
        let placement = Placement::default()
            .control(control.handle())
            .work(work.handle())
            .tenant(work.handle())
            .store(work.handle());
        let (release, released) = watch::channel(false);
        let node = |index: usize| {
            Mesh::builder(node_name(index))
                .store(Store::shared(handle.clone()))
                .placement(placement.clone())
                .protocol_period(PERIOD)
                .slots(1)
                .data(released.clone())
                .job(hold)
        };
        let seed = node(0).start().await.context("the seed")?;
        let seed_address = seed.gossip_addr().to_string();
        let begun = Instant::now();
        let others = (1..count).map(|index| node(index).seed(seed_address.clone()).start());
        let mut nodes = vec![seed];
        nodes.extend(try_join_all(others).await.context("a node")?);
        Ok(Self { nodes, release, store, arbiters, begun })
    }

    /// Time until each sees all the others alive.
    async fn converged(&self) -> Option<Duration> {
        let all = |mesh: &Mesh| mesh.members().present().count() == self.nodes.len();
        wait_until(self.begun, CONVERGE_LIMIT, || self.nodes.iter().all(all)).await
    }

    async fn stop(self) {
        self.release.send_replace(true);
        join_all(self.nodes.iter().map(|mesh| mesh.drain(Duration::from_secs(5)))).await;
        self.store.stop().await;
        for arbiter in self.arbiters {
            arbiter.stop();
        }
    }
}

/// Time from the moment the seed has started, when the others begin to start, until every one of
/// `nodes` nodes sees all the others alive; `None` when that took longer than [`CONVERGE_LIMIT`].
///
/// As for the peer: all nodes in this process, node 0 the only seed of the others, a period of
/// [`PERIOD`], the others started together and not one after the other, the nodes looked at through
/// [`wait_until`], all of them stopped at the end.
pub(crate) fn converge(nodes: usize) -> anyhow::Result<Option<Duration>> {
    System::new().block_on(async {
        let nodes = Nodes::start(nodes).await?;
        let took = nodes.converged().await;
        nodes.stop().await;
        Ok(took)
    })
}

/// What our nodes did with the work of one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StealOutcome {
    /// Jobs that moved to another node.
    pub(crate) stolen: u64,
    /// Time from the enqueue of the jobs until no node buffered so few that it would still steal;
    /// `None` when that took longer than [`STEAL_WINDOW`].
    pub(crate) level: Option<Duration>,
}

/// Puts [`STEAL_JOBS`] jobs without a key on one of [`STEAL_NODES`] converged nodes, whose buffer
/// holds them all.
///
/// As for the peer: no job finishes before the outcome is taken, so only a steal moves one; and none
/// waits in the store, so no node gets one by claiming it.
pub(crate) fn steal() -> anyhow::Result<StealOutcome> {
    System::new().block_on(async {
        let mesh = Nodes::start(STEAL_NODES).await?;
        mesh.converged().await.context("five nodes converge")?;
        let jobs: Result<Vec<_>, _> =
            (0..STEAL_JOBS).map(|_| Enqueue::new(&Hold).into_request()).collect();
        let begun = Instant::now();
        mesh.nodes[0].enqueue_batch(jobs?).await?;
        let content = |mesh: &Mesh| mesh.load().queued > STEAL_THRESHOLD;
        let level = wait_until(begun, STEAL_WINDOW, || mesh.nodes.iter().all(content)).await;
        let stolen = mesh.nodes[1..].iter().map(|m| m.metrics().jobs_stolen_in).sum();
        mesh.stop().await;
        Ok(StealOutcome { stolen, level })
    })
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
