//! The peer's half: flexiq-mesh, driven through its public API as its own worker drives it.
//!
//! Its worker makes a [`MeshNode`], calls `spawn_gossip` and `spawn_steal_server` on a runtime of
//! two threads, and calls `try_steal` from its dispatch loop. Here it gets every benefit of the
//! doubt: the seed is answering before any other node starts (the peer sends its join once, so a
//! seed that comes later is never found), and idle nodes try to steal every 10 ms, where its own
//! loop tries once and then sleeps until its scheduler hands it a job.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use flexiq_core::job::{Job, NewJob, now_millis};
use flexiq_mesh::ring::HashRing;
use flexiq_mesh::state::Member;
use flexiq_mesh::swim::message::GossipMessage;
use flexiq_mesh::{MemberState, MeshConfig, MeshNode, WorkerInfo};
use tokio::net::UdpSocket;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::hash_ring::{Ring, VIRTUAL_NODES};
use crate::scenario::{
    CONVERGE_LIMIT, PERIOD, Ports, STEAL_JOBS, STEAL_NODES, STEAL_WINDOW, ensure_free, fresh_ports,
    node_name, wait_until,
};

/// Slots that each node advertises, as many as a node of the demo has.
const THREADS: u16 = 4;

/// How long the loops of a node have to end once they are told to.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// Time from the moment the seed answers, when the others begin to start, until every one of
/// `nodes` nodes sees all the others alive; `None` when that took longer than [`CONVERGE_LIMIT`].
pub(crate) fn converge(nodes: usize) -> anyhow::Result<Option<Duration>> {
    let (mesh, started) = PeerMesh::start(nodes)?;
    let took = mesh.all_see_all(started);
    mesh.stop()?;
    Ok(took)
}

/// What the thieves know about the victim's backlog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backlog {
    /// What the victim's gossip says, which is all that a user of the peer has.
    Gossiped,
    /// The truth, written into each thief's member table by hand. The control: it shows that
    /// nothing else in the scenario keeps a thief from stealing.
    WrittenByHand,
}

/// Jobs that the other nodes took in [`STEAL_WINDOW`] from the one that has them all.
///
/// The victim runs nothing; a thief drains what it stole at once, as a dispatcher with room does,
/// so it is always hungry.
pub(crate) fn steal(backlog: Backlog) -> anyhow::Result<u64> {
    let (mesh, started) = PeerMesh::start(STEAL_NODES)?;
    ensure!(
        mesh.all_see_all(started).is_some(),
        "the peer's {STEAL_NODES} nodes did not find each other"
    );

    let (victim, thieves) = mesh.nodes.split_first().context("a mesh of no nodes")?;
    let buffered =
        victim.prefetch((0..STEAL_JOBS).map(|i| job(&format!("job-{i}"), Vec::new())).collect());
    ensure!(buffered == STEAL_JOBS, "the victim's buffer took {buffered} of {STEAL_JOBS} jobs");
    if backlog == Backlog::WrittenByHand {
        for thief in thieves {
            let mut member = thief
                .state()
                .get_member(victim.state().local_worker_id())
                .context("victim unknown")?;
            member.info.local_buffer_len = victim.local_len() as u16;
            thief.state().upsert_member(member);
        }
    }

    let thieves_at_work: Vec<_> =
        thieves.iter().cloned().map(|thief| mesh.runtime.spawn(keep_stealing(thief))).collect();
    mesh.runtime.block_on(async { tokio::time::sleep(STEAL_WINDOW).await });
    thieves_at_work.iter().for_each(JoinHandle::abort);

    let stolen = thieves.iter().map(|thief| thief.metrics().jobs_stolen_in).sum();
    mesh.stop()?;
    Ok(stolen)
}

/// The stealing half of the peer's dispatch loop, on a short timer.
async fn keep_stealing(thief: Arc<MeshNode>) {
    loop {
        if thief.should_steal() {
            thief.try_steal().await;
            while let Some(job) = thief.pop_local() {
                black_box(job);
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The configuration of a node on loopback: the peer's defaults but for its addresses and period.
pub(crate) fn config(ports: Ports, seeds: Vec<String>) -> MeshConfig {
    MeshConfig {
        gossip_port: ports.gossip,
        steal_port: ports.steal,
        bind_addr: "127.0.0.1".to_owned(),
        seeds,
        protocol_period_ms: PERIOD.as_millis() as u64,
        ..MeshConfig::default()
    }
}

/// A job as the peer's scheduler would hand it over.
pub(crate) fn job(task: &str, payload: Vec<u8>) -> Job {
    NewJob {
        queue: "default".to_owned(),
        task_name: task.to_owned(),
        payload,
        priority: 0,
        scheduled_at: now_millis(),
        max_retries: 0,
        timeout_ms: 30_000,
        unique_key: None,
        metadata: None,
        notes: None,
        depends_on: Vec::new(),
        expires_at: None,
        result_ttl_ms: None,
        namespace: None,
        debounce_key: None,
        enqueued_by: None,
    }
    .into_job()
}

/// A member as the peer's gossip describes one that is alive.
pub(crate) fn member(name: &str, ports: Ports) -> Member {
    Member {
        info: WorkerInfo {
            worker_id: name.to_owned(),
            gossip_addr: ports.gossip_address(),
            steal_addr: (std::net::Ipv4Addr::LOCALHOST, ports.steal).into(),
            queues: vec!["default".to_owned()],
            threads: THREADS,
            current_load: 0,
            local_buffer_len: 0,
            capacity: THREADS,
            updated_at: now_millis(),
        },
        state: MemberState::Alive,
        incarnation: 1,
    }
}

/// Some of the peer's nodes on a runtime of their own.
///
/// Dropping the runtime is what stops them for certain: one `request_shutdown` ends one of a
/// node's two loops.
pub(crate) struct PeerMesh {
    pub(crate) runtime: Runtime,
    pub(crate) nodes: Vec<Arc<MeshNode>>,
    pub(crate) loops: Vec<Loops>,
    ports: Vec<Ports>,
}

/// The two tasks of one node.
pub(crate) struct Loops {
    pub(crate) gossip: JoinHandle<()>,
    pub(crate) steal: JoinHandle<()>,
}

impl PeerMesh {
    /// A mesh without nodes.
    pub(crate) fn empty() -> anyhow::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        Ok(Self { runtime, nodes: Vec::new(), loops: Vec::new(), ports: Vec::new() })
    }

    /// Starts `nodes` nodes, of which the first is the seed of the others, and says when the
    /// second was about to start.
    pub(crate) fn start(nodes: usize) -> anyhow::Result<(Self, Instant)> {
        let ports = fresh_ports(nodes)?;
        let mut mesh = Self::empty()?;
        mesh.add(&node_name(0), config(ports[0], Vec::new()));
        mesh.await_answer(ports[0])?;
        let started = Instant::now();
        for (index, &own) in ports.iter().enumerate().skip(1) {
            mesh.add(&node_name(index), config(own, vec![ports[0].gossip_address().to_string()]));
        }
        Ok((mesh, started))
    }

    /// Starts one more node.
    pub(crate) fn add(&mut self, name: &str, config: MeshConfig) {
        let _guard = self.runtime.enter();
        self.ports.push(Ports { gossip: config.gossip_port, steal: config.steal_port });
        let node = Arc::new(MeshNode::new(name.to_owned(), config));
        self.loops.push(Loops {
            gossip: node.spawn_gossip(vec!["default".to_owned()], THREADS),
            steal: node.spawn_steal_server(),
        });
        self.nodes.push(node);
    }

    /// Waits until the node at `ports` answers a ping that tells it nothing.
    pub(crate) fn await_answer(&self, ports: Ports) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let socket = UdpSocket::bind("127.0.0.1:0").await?;
            let ping = GossipMessage::Ping {
                seq: 0,
                from: "probe".to_owned(),
                from_addr: socket.local_addr()?,
            }
            .encode()?;
            let mut answer = [0; 2048];
            for _ in 0..200 {
                socket.send_to(&ping, ports.gossip_address()).await?;
                if tokio::time::timeout(Duration::from_millis(10), socket.recv_from(&mut answer))
                    .await
                    .is_ok_and(|read| read.is_ok())
                {
                    return Ok(());
                }
            }
            bail!("the peer's seed does not answer at {}", ports.gossip_address())
        })
    }

    /// Time since `started` until every node sees all the others alive.
    pub(crate) fn all_see_all(&self, started: Instant) -> Option<Duration> {
        let others = self.nodes.len() - 1;
        self.runtime.block_on(wait_until(started, CONVERGE_LIMIT, || {
            self.nodes.iter().all(|node| node.state().alive_count() == others)
        }))
    }

    /// Stops every node and fails if one of their sockets outlives it.
    pub(crate) fn stop(self) -> anyhow::Result<()> {
        self.nodes.iter().for_each(|node| node.request_shutdown());
        self.runtime.shutdown_timeout(STOP_GRACE);
        ensure_free(&self.ports)
    }
}

/// The peer's hash ring, changed in place.
pub(crate) struct PeerRing(HashRing);

impl PeerRing {
    /// A hash ring of `names`, with the peer's default of virtual nodes each.
    pub(crate) fn new(names: &[String]) -> Self {
        let mut ring = HashRing::new(VIRTUAL_NODES as usize);
        names.iter().for_each(|name| ring.add_worker(name));
        Self(ring)
    }
}

impl Ring for PeerRing {
    fn look_up(&self, keys: &[String]) {
        for key in keys {
            black_box(self.0.preferred_worker(black_box(key)));
        }
    }

    fn join_and_leave(&mut self, newcomer: &str) {
        self.0.add_worker(black_box(newcomer));
        self.0.remove_worker(black_box(newcomer));
    }
}
