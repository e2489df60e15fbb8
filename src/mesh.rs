//! A running node, as its user holds it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::Stream;
use meshwork_actors::fair::tenant_executor::{AwaitIdle, CancelAll};
use meshwork_actors::identity::Identity;
use meshwork_actors::mesh::membership_store::{JoinSeeds, Leave, MembershipStore, Subscribe};
use meshwork_actors::mesh::ring_keeper::RingKeeper;
use meshwork_actors::metrics::MetricsSnapshot;
use meshwork_actors::overseer::{Joining, StopReason};
use meshwork_actors::start::{Deaths, Running};
use meshwork_actors::store::messages::{
    Cancel, Close, CountJobs, Counts, JobRow, Lookup, Release, Retire, StoreError, StoreHandle,
    StoreResult,
};
use meshwork_actors::subscribers::{MemberTable, Sink};
use meshwork_actors::work::deque_owner::{CloseDeque, DequeOwner};
use meshwork_actors::work::enqueue::{
    Accepted, Enqueue, EnqueueBatch, EnqueueError, Job, Request, Ticket,
};
use meshwork_actors::work::result_collector::{Await, AwaitError, Follow, Followed};
use meshwork_actors::work::stealer::CloseStealer;
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::{Generation, JobId, NodeId};
use meshwork_protocol::job::Recorded;
use meshwork_protocol::load::Load;
use meshwork_protocol::swim::MembershipEvent;
use tokio::sync::{mpsc, watch};

use crate::builder::{MeshBuilder, StartError};
use crate::config::{ConfigError, check_seed};
#[cfg(target_os = "linux")]
use crate::passes::StopWorkers;
use crate::placement::Arbiters;
use crate::wiring::{Wired, WiringRecord};

/// Membership events that wait for a reader of [`Mesh::events`]; one that is slower gets a fresh
/// snapshot.
const EVENTS_WAITING: usize = 256;

/// A node of a mesh. Cheap to clone, and usable from any thread.
///
/// Dropping it stops nothing: [`Mesh::drain`] ends a node, and so does the end of its `System`.
#[derive(Clone)]
pub struct Mesh(Arc<Inner>);

struct Inner {
    #[cfg(target_os = "linux")]
    passes: Option<crate::passes::Passes>,
    identity: Arc<Identity>,
    gossip: SocketAddr,
    steal: SocketAddr,
    store: StoreHandle,
    seeds: usize,
    wired: Handles,
    /// The limit of the first drain.
    drain: watch::Sender<Option<Duration>>,
    stopped: watch::Receiver<Option<Stopped>>,
}

struct Handles {
    record: WiringRecord,
    members: Addr<MembershipStore>,
    ring_keeper: Addr<RingKeeper>,
    deque: Addr<DequeOwner>,
    outcomes: Recipient<Await>,
    follow: Recipient<Follow>,
    table: Arc<arc_swap::ArcSwap<MemberTable>>,
    ring: Arc<arc_swap::ArcSwap<HashRing>>,
    load: Arc<meshwork_actors::load_cell::LoadCell>,
    metrics: Arc<meshwork_actors::metrics::Metrics>,
    joining: watch::Receiver<Joining>,
    faults: watch::Receiver<Option<StopReason>>,
}

/// What a job came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome<T> {
    /// Its handler returned this.
    Succeeded(T),
    /// It failed for good.
    Failed {
        /// Why.
        error: String,
        /// After how many attempts.
        attempts: u32,
    },
    /// It was withdrawn before it ran.
    Cancelled,
    /// Nothing can be said.
    Unknown(OutcomeError),
}

impl<T> Outcome<T> {
    /// The result, if the job succeeded.
    pub fn succeeded(self) -> Option<T> {
        match self {
            Self::Succeeded(result) => Some(result),
            _ => None,
        }
    }
}

/// Why nothing can be said of a job's outcome. The job itself is not touched by it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutcomeError {
    /// Too many callers wait already. Ask again.
    #[error("too many callers wait for outcomes already")]
    Busy,
    /// The store has no such job.
    #[error("the store has no such job")]
    NoSuchJob,
    /// The job succeeded, and its result is not what this kind of job returns.
    #[error("the result does not decode: {0}")]
    NotDecoded(String),
    /// The node has stopped. Another one can say.
    #[error("the node has stopped")]
    Stopped,
}

/// How a drain went; all is false and zero where the node died before it was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DrainReport {
    /// Whether every handler that was running returned in time.
    pub finished: bool,
    /// Jobs given back to the store, for other nodes.
    pub released: usize,
    /// Whether the store took the node's goodbye. If not, its lease runs out, and its jobs are
    /// requeued then.
    pub retired: bool,
}

pub(crate) struct Started {
    #[cfg(target_os = "linux")]
    pub(crate) passes: Option<crate::passes::Passes>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) gossip: SocketAddr,
    pub(crate) steal: SocketAddr,
    pub(crate) store: StoreHandle,
    /// The store, if this node started one of its own.
    pub(crate) own_store: Option<Running>,
    /// How many seeds were configured.
    pub(crate) seeds: usize,
    pub(crate) wired: Wired,
    pub(crate) arbiters: Arbiters,
}

impl Mesh {
    /// A node called `id`, to be configured and started.
    pub fn builder(id: impl AsRef<str>) -> MeshBuilder {
        MeshBuilder::new(id.as_ref())
    }

    pub(crate) fn new(started: Started) -> Self {
        #[cfg(target_os = "linux")]
        let passes = started.passes;
        let Started { identity, gossip, steal, store, own_store, seeds, wired, arbiters, .. } =
            started;
        let (drain, drain_requested) = watch::channel(None);
        let (stopped_sender, stopped) = watch::channel(None);
        let end = End {
            identity: identity.clone(),
            deaths: wired.deaths,
            running: wired.running,
            drain: Drain {
                store: store.clone(),
                deque: wired.deque.clone().recipient(),
                stealer: wired.stealer.recipient(),
                await_idle: wired.executor.clone().recipient(),
                #[cfg(target_os = "linux")]
                stop_workers: wired.passes.map(|passes| passes.worker.recipient()),
                cancel: wired.executor.recipient(),
                leave: wired.members.clone().recipient(),
            },
            arbiters,
            store: own_store.map(|running| (running, store.close.clone())),
            faults: wired.stop.clone(),
            requested: drain_requested,
            stopped: stopped_sender,
        };
        actix::spawn(end.run());
        let wired = Handles {
            record: wired.record,
            members: wired.members,
            ring_keeper: wired.ring_keeper,
            deque: wired.deque,
            outcomes: wired.collector.clone().recipient(),
            follow: wired.collector.recipient(),
            table: wired.table,
            ring: wired.ring,
            load: wired.load,
            metrics: wired.metrics,
            joining: wired.joining,
            faults: wired.stop,
        };
        Self(Arc::new(Inner {
            #[cfg(target_os = "linux")]
            passes,
            identity,
            gossip,
            steal,
            store,
            seeds,
            wired,
            drain,
            stopped,
        }))
    }

    /// The node's passes, if it was given some. They end with it.
    #[cfg(target_os = "linux")]
    pub fn passes(&self) -> Option<&crate::passes::Passes> {
        self.0.passes.as_ref()
    }

    /// The node's name.
    pub fn id(&self) -> &NodeId {
        &self.0.identity.node
    }

    /// The node's present generation.
    pub fn generation(&self) -> Generation {
        self.0.identity.generation()
    }

    /// Where others find it: a seed for them.
    pub fn gossip_addr(&self) -> SocketAddr {
        self.0.gossip
    }

    /// Where thieves find it.
    pub fn steal_addr(&self) -> SocketAddr {
        self.0.steal
    }

    /// The actor that takes [`Enqueue`].
    pub fn deque(&self) -> Addr<DequeOwner> {
        self.0.wired.deque.clone()
    }

    /// The actor that takes [`Subscribe`].
    pub fn membership(&self) -> Addr<MembershipStore> {
        self.0.wired.members.clone()
    }

    /// The actor that says whose a key is.
    pub fn ring_keeper(&self) -> Addr<RingKeeper> {
        self.0.wired.ring_keeper.clone()
    }

    /// Accepts a job: it is stored when this returns.
    ///
    /// # Errors
    /// [`EnqueueError`]; where it is retryable, sending the same `Enqueue` again is safe.
    pub async fn enqueue<J: Job>(&self, enqueue: Enqueue<J>) -> Result<Ticket<J>, EnqueueError> {
        if !self.0.wired.deque.connected() {
            return Err(EnqueueError::Stopping);
        }
        self.0.wired.deque.send(enqueue).await.unwrap_or(Err(StoreError::Stopped.into()))
    }

    /// Accepts many jobs: all are stored when this returns, or none.
    ///
    /// # Errors
    /// As [`Mesh::enqueue`].
    pub async fn enqueue_batch(&self, jobs: Vec<Request>) -> Result<Vec<Accepted>, EnqueueError> {
        if !self.0.wired.deque.connected() {
            return Err(EnqueueError::Stopping);
        }
        let sent = self.0.wired.deque.send(EnqueueBatch(jobs));
        sent.await.unwrap_or(Err(StoreError::Stopped.into()))
    }

    /// Waits until the job has ended, wherever it runs, and says what it came to.
    pub async fn outcome<J: Job>(&self, ticket: &Ticket<J>) -> Outcome<J::Output> {
        let recorded = self.0.wired.outcomes.send(Await(ticket.id())).await;
        match recorded.unwrap_or(Err(AwaitError::Stopped)) {
            Ok(Recorded::Succeeded(json)) => match serde_json::from_str(&json) {
                Ok(result) => Outcome::Succeeded(result),
                Err(e) => Outcome::Unknown(OutcomeError::NotDecoded(e.to_string())),
            },
            Ok(Recorded::Dead { error, attempts }) => Outcome::Failed { error, attempts },
            Ok(Recorded::Cancelled) => Outcome::Cancelled,
            Ok(_) => Outcome::Unknown(OutcomeError::NotDecoded("a newer kind of outcome".into())),
            Err(AwaitError::Busy) => Outcome::Unknown(OutcomeError::Busy),
            Err(AwaitError::Unknown(_)) => Outcome::Unknown(OutcomeError::NoSuchJob),
            Err(_) => Outcome::Unknown(OutcomeError::Stopped),
        }
    }

    /// Withdraws jobs that nobody has claimed yet; returns those that were withdrawn.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was withdrawn.
    pub async fn cancel(&self, jobs: Vec<JobId>) -> StoreResult<Vec<JobId>> {
        self.0.store.cancel.send(Cancel { jobs }).await.unwrap_or(Err(StoreError::Stopped))
    }

    /// What the store has of these jobs; unknown ones are left out.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn lookup(&self, jobs: Vec<JobId>) -> StoreResult<Vec<JobRow>> {
        self.0.store.lookup.send(Lookup { jobs }).await.unwrap_or(Err(StoreError::Stopped))
    }

    /// How many jobs the store has, by state, all nodes together.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn counts(&self) -> StoreResult<Counts> {
        self.0.store.count.send(CountJobs).await.unwrap_or(Err(StoreError::Stopped))
    }

    /// Membership events: a snapshot first, then each in order; a fresh snapshot when this reader was
    /// too slow. Ends when the node does.
    pub fn events(&self) -> impl Stream<Item = MembershipEvent> + Send + Unpin + use<> {
        let (sender, mut receiver) = mpsc::channel(EVENTS_WAITING);
        self.0.wired.members.do_send(Subscribe(Sink::Channel(sender)));
        futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx))
    }

    /// What happens to jobs on this node. At most `capacity` events wait for the reader; those beyond
    /// are counted instead. Ends when the node does.
    pub fn job_events(
        &self,
        capacity: usize,
    ) -> impl Stream<Item = Followed> + Send + Unpin + use<> {
        let (sender, mut receiver) = mpsc::channel(capacity.max(1));
        self.0.wired.follow.do_send(Follow(sender));
        futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx))
    }

    /// The member table as it is now.
    pub fn members(&self) -> Arc<MemberTable> {
        self.0.wired.table.load_full()
    }

    /// The hash ring as it is now.
    pub fn hash_ring(&self) -> Arc<HashRing> {
        self.0.wired.ring.load_full()
    }

    /// How busy this node is now.
    pub fn load(&self) -> Load {
        self.0.wired.load.load()
    }

    /// The counters as they are now.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.0.wired.metrics.snapshot()
    }

    /// How far the node has come with its seeds.
    pub fn joining(&self) -> Joining {
        self.0.wired.joining.borrow().clone()
    }

    /// Who was started, and who sends what to whom.
    pub fn wiring(&self) -> &WiringRecord {
        &self.0.wired.record
    }

    /// Tries these seeds too: `host:port` each.
    ///
    /// # Errors
    /// [`ConfigError::Seed`] when one is no such thing; none is tried then.
    pub fn join(&self, seeds: Vec<String>) -> Result<(), ConfigError> {
        seeds.iter().try_for_each(|seed| check_seed(seed))?;
        self.0.wired.members.do_send(JoinSeeds(seeds));
        Ok(())
    }

    /// Ends the node in order: accept nothing more, give back what has not started, let handlers
    /// return until `limit`, leave the mesh, retire the lease, stop.
    ///
    /// It goes on when the caller does not wait for it. May be called more than once: the first
    /// limit counts, and every caller gets the same report.
    pub async fn drain(&self, limit: Duration) -> DrainReport {
        self.0.drain.send_if_modified(|requested| {
            let first = requested.is_none();
            requested.get_or_insert(limit);
            first
        });
        let mut stopped = self.0.stopped.clone();
        let report = stopped.wait_for(Option::is_some).await.ok().and_then(|s| s.clone());
        report.and_then(|stopped| stopped.drained).unwrap_or_default()
    }

    /// Waits until a seed has answered, or none has within `limit`.
    pub(crate) async fn await_joined(&self, limit: Duration) -> Result<(), StartError> {
        let mut joining = self.0.wired.joining.clone();
        let seeds = self.0.seeds;
        let decided = |joining: &Joining| joining.joined || joining.unreachable.len() >= seeds;
        let mut faults = self.0.wired.faults.clone();
        tokio::select! {
            biased;
            _ = faults.wait_for(Option::is_some) => {}
            _ = tokio::time::timeout(limit, joining.wait_for(decided)) => {}
        }
        let fault = faults.borrow().clone();
        if let Some(fault) = fault {
            self.stopped().await;
            return Err(match fault {
                StopReason::IdInUse { holder } => {
                    StartError::IdInUse { id: self.id().clone(), holder }
                }
                fault => StartError::Stopped(fault),
            });
        }
        Ok(())
    }

    /// Waits until the node has stopped, and says why it did.
    pub async fn stopped(&self) -> StopReason {
        let mut stopped = self.0.stopped.clone();
        let stopped = stopped.wait_for(Option::is_some).await.ok().and_then(|s| s.clone());
        stopped.map_or(StopReason::SystemEnded, |stopped| stopped.reason)
    }
}

/// Time that each step of an end has, where the caller sets none.
const STOP_LIMIT: Duration = Duration::from_secs(5);

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mesh({} at {})", self.0.identity.owner(), self.0.gossip)
    }
}

/// How a node ended.
#[derive(Clone)]
struct Stopped {
    reason: StopReason,
    drained: Option<DrainReport>,
}

/// Ends a node, whatever the cause. It is a task of its own, so that no caller who loses patience
/// leaves a node half ended; and it outlives the handles, so that dropping them ends nothing.
struct End {
    identity: Arc<Identity>,
    deaths: Deaths,
    running: Vec<Running>,
    drain: Drain,
    arbiters: Arbiters,
    /// The store that this node started: the last to end.
    store: Option<(Running, Recipient<Close>)>,
    faults: watch::Receiver<Option<StopReason>>,
    requested: watch::Receiver<Option<Duration>>,
    stopped: watch::Sender<Option<Stopped>>,
}

/// Whom a drain asks.
struct Drain {
    store: StoreHandle,
    deque: Recipient<CloseDeque>,
    stealer: Recipient<CloseStealer>,
    await_idle: Recipient<AwaitIdle>,
    #[cfg(target_os = "linux")]
    stop_workers: Option<Recipient<StopWorkers>>,
    cancel: Recipient<CancelAll>,
    leave: Recipient<Leave>,
}

impl End {
    async fn run(mut self) {
        let requested = async {
            match self.requested.wait_for(Option::is_some).await {
                Ok(limit) => *limit,
                // The handles are gone, and the node lives on.
                Err(_) => std::future::pending().await,
            }
        };
        let (mut reason, limit) = tokio::select! {
            fault = self.faults.wait_for(Option::is_some) => {
                let fault = fault.ok().and_then(|fault| fault.clone());
                (fault.unwrap_or_else(overseer_died), None)
            }
            limit = requested => (StopReason::Drained, limit),
        };
        let mut drained = None;
        if let Some(limit) = limit {
            tokio::select! {
                report = Self::drain(&self.drain, &self.identity, &mut self.running, limit) => {
                    drained = Some(report);
                }
                fault = self.faults.wait_for(Option::is_some) => {
                    let fault = fault.ok().and_then(|fault| fault.clone());
                    reason = fault.unwrap_or_else(overseer_died);
                }
            }
        }
        self.deaths.expect();
        for actor in self.running.into_iter().rev() {
            end_actor(actor).await;
        }
        if let Some((store, close)) = self.store {
            // A store that does not close in time has committed what it answered.
            let _ = tokio::time::timeout(STOP_LIMIT, close.send(Close)).await;
            end_actor(store).await;
        }
        self.arbiters.stop();
        self.stopped.send_replace(Some(Stopped { reason, drained }));
    }

    async fn drain(
        drain: &Drain,
        identity: &Identity,
        running: &mut Vec<Running>,
        limit: Duration,
    ) -> DrainReport {
        let owner = identity.owner();
        drain.stealer.do_send(CloseStealer);
        let claims = within(STOP_LIMIT, drain.deque.send(CloseDeque)).await.unwrap_or_default();
        let release = drain.store.release.send(Release { owner: owner.clone(), claims, to: None });
        let released = within(STOP_LIMIT, release).await.and_then(Result::ok).unwrap_or(0);
        let begun = tokio::time::Instant::now();
        let finished = within(limit, drain.await_idle.send(AwaitIdle)).await.is_some();
        if !finished {
            within(STOP_LIMIT, drain.cancel.send(CancelAll)).await;
        }
        // Passes that run here, for this node's jobs or for others.
        #[cfg(target_os = "linux")]
        if let Some(stop_workers) = &drain.stop_workers {
            let left = limit.saturating_sub(begun.elapsed());
            within(left, stop_workers.send(StopWorkers)).await;
        }
        // From here no handler is polled, and nobody registers a new boot of a node that leaves.
        if let Some(at) = running.iter().position(|actor| actor.name() == "LeaseKeeper") {
            end_actor(running.remove(at)).await;
        }
        identity.end_lease();
        // A mesh that hears no goodbye finds out by probing.
        within(STOP_LIMIT, drain.leave.send(Leave)).await;
        let retire = drain.store.retire.send(Retire { owner });
        let requeued = within(STOP_LIMIT, retire).await.and_then(Result::ok);
        DrainReport {
            finished,
            released: released + requeued.unwrap_or(0),
            retired: requeued.is_some(),
        }
    }
}

/// The answer, if it comes in time and the actor lives.
async fn within<T, E>(limit: Duration, answer: impl Future<Output = Result<T, E>>) -> Option<T> {
    tokio::time::timeout(limit, answer).await.ok().and_then(Result::ok)
}

fn overseer_died() -> StopReason {
    StopReason::ActorDied { actor: "Overseer".into(), reason: "it ended".into() }
}

async fn end_actor(actor: Running) {
    let name = actor.name();
    if tokio::time::timeout(STOP_LIMIT, actor.stop()).await.is_err() {
        tracing::error!(actor = name, "it does not stop: its arbiter is blocked");
    }
}
