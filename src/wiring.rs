//! Who is started, on which arbiter, and who knows whom: decided here and nowhere else.
//!
//! Each recipient that is handed out is recorded; a test holds the table in ARCHITECTURE.md against
//! the record.

use std::any::type_name;
use std::net::TcpListener;
use std::sync::Arc;

use actix::dev::ToEnvelope;
use actix::prelude::*;
use arc_swap::ArcSwap;
use meshwork_actors::fair::runner::{Extensions, Handlers};
use meshwork_actors::fair::tenant_executor::{self, TenantExecutor};
#[cfg(target_os = "linux")]
use meshwork_actors::host::{
    heartbeat_writer::HeartbeatWriter,
    pass_client::PassClient,
    pass_host::{JoinError, PassHost},
    pass_submitter::{self, PassSubmitter},
    pass_worker::PassWorker,
    reclaimer::{Heart, ReclaimerOptions},
    registry::PassRegistry,
    watchdog::Watchdog,
    worker_thread::{WorkerOptions, WorkerThread},
};
use meshwork_actors::identity::Identity;
use meshwork_actors::load_cell::LoadCell;
use meshwork_actors::mesh::gossip_socket::{self, Bound, GossipSocket, Transmit};
use meshwork_actors::mesh::hints::Hints;
use meshwork_actors::mesh::membership_store::{self, MembershipStore};
use meshwork_actors::mesh::ring_keeper::RingKeeper;
use meshwork_actors::mesh::swim_prober::{self, SwimProber};
use meshwork_actors::metrics::Metrics;
use meshwork_actors::overseer::{Joining, Overseer, StopReason};
use meshwork_actors::start::{Death, Deaths, Running, Slot};
use meshwork_actors::store::messages::{Registered, StoreHandle};
use meshwork_actors::subscribers::MemberTable;
use meshwork_actors::work::deque_owner::{self, DequeOwner, KnownHandlers};
use meshwork_actors::work::lease_keeper::{self, LeaseKeeper};
#[cfg(target_os = "linux")]
use meshwork_actors::work::pass_awaits::Completed;
use meshwork_actors::work::prefetcher::{self, Prefetcher};
use meshwork_actors::work::result_collector::{self, ResultCollector};
use meshwork_actors::work::steal_listener::{self, StealListener};
use meshwork_actors::work::stealer::{self, Stealer};
use meshwork_protocol::deque::{DequeConfig, Dispatcher};
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::Incarnation;
use meshwork_protocol::lease::{Keeper, LeaseConfig};
use meshwork_protocol::prefetch::{self, PrefetchConfig};
use meshwork_protocol::steal::{RateLimit, StealConfig, Thief};
use meshwork_protocol::swim::detector::Detector;
use meshwork_protocol::swim::members::Members;
use meshwork_protocol::swim::{Member, MemberState};
use tokio::sync::{mpsc, watch};

use crate::builder::StartError;
use crate::config::Config;
use crate::links::Links;
#[cfg(target_os = "linux")]
use crate::passes::PassesError;
use crate::placement::Arbiters;

/// The arbiter of deadlines: it carries nothing that a tenant can feed.
const CONTROL: &str = "control";
/// The arbiter of the deque and what fills it.
const WORK: &str = "work";
/// The arbiter of handlers.
const TENANT: &str = "tenant-0";

/// What a node's actors are, and who sends what to whom.
#[derive(Clone, Debug, Default)]
pub struct WiringRecord {
    /// Every actor, in the order of their start.
    pub actors: Vec<ActorRecord>,
    /// Every recipient that was handed out.
    pub edges: Vec<Edge>,
}

/// One actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActorRecord {
    /// Its type.
    pub name: &'static str,
    /// Where it runs by default.
    pub arbiter: &'static str,
    /// Messages that its mailbox holds for senders who wait for room.
    pub bound: usize,
}

/// One recipient that was handed out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    /// Who sends.
    pub from: &'static str,
    /// The message's type.
    pub message: &'static str,
    /// Who receives.
    pub to: &'static str,
}

struct Wiring(WiringRecord);

impl Wiring {
    fn slot<A>(&mut self, name: &'static str, arbiter: &'static str, bound: usize) -> Slot<A>
    where
        A: Actor<Context = Context<A>>,
    {
        self.0.actors.push(ActorRecord { name, arbiter, bound });
        Slot::new(name, bound)
    }

    fn hand<A, M>(&mut self, from: &'static str, to: &Slot<A>) -> Recipient<M>
    where
        A: Actor<Context = Context<A>> + Handler<M>,
        A::Context: ToEnvelope<A, M>,
        M: Message<Result: Send> + Send + 'static,
    {
        self.edge::<M>(from, to.name());
        to.addr().recipient()
    }

    fn edge<M>(&mut self, from: &'static str, to: &'static str) {
        let message = type_name::<M>().rsplit("::").next().unwrap_or_default();
        self.0.edges.push(Edge { from, message, to });
    }
}

/// What the passes of a process are made of.
#[cfg(target_os = "linux")]
pub(crate) struct PassParts {
    pub(crate) host: Arc<PassHost>,
    /// Where this process submits.
    pub(crate) client: Option<PassClient>,
    pub(crate) registry: PassRegistry,
    pub(crate) worker: WorkerOptions,
    pub(crate) threads: Vec<WorkerThread>,
    pub(crate) reclaimer: ReclaimerOptions,
}

/// The actors of passes, started.
#[cfg(target_os = "linux")]
pub(crate) struct WiredPasses {
    pub(crate) submitter: Option<Addr<PassSubmitter>>,
    pub(crate) worker: Addr<PassWorker>,
    pub(crate) watchdog: Addr<Watchdog>,
}

/// The actors of passes alone, in a process that is no node.
#[cfg(target_os = "linux")]
pub(crate) fn wire_passes(
    parts: PassParts,
    arbiters: &Arbiters,
    deaths: &Deaths,
) -> Result<(WiredPasses, WiringRecord, Vec<Running>), JoinError> {
    let mut wiring = Wiring(WiringRecord::default());
    let collector = wiring.slot("ResultCollector", WORK, 1_024);
    let passes = add_passes(&mut wiring, parts, &collector)?;
    let mut running = Vec::new();
    let without_jobs = |_: &mut Context<_>| ResultCollector::without_jobs();
    running.push(collector.start(&arbiters.work, deaths, without_jobs));
    let wired = passes.start(arbiters, deaths, &mut running);
    Ok((wired, wiring.0, running))
}

/// The actors of passes, still to be started.
#[cfg(target_os = "linux")]
struct PassSlots {
    parts: PassParts,
    submitter: Option<(Slot<PassSubmitter>, PassClient, pass_submitter::Peers)>,
    worker: Slot<PassWorker>,
    heartbeat: Slot<HeartbeatWriter>,
    watchdog: Slot<Watchdog>,
}

#[cfg(target_os = "linux")]
fn add_passes(
    w: &mut Wiring,
    parts: PassParts,
    collector: &Slot<ResultCollector>,
) -> Result<PassSlots, JoinError> {
    let submitter = match parts.client.clone() {
        None => None,
        Some(client) => {
            let slot = w.slot("PassSubmitter", WORK, 1_024);
            let peers = pass_submitter::Peers {
                expect: w.hand("PassSubmitter", collector),
                expect_all: w.hand("PassSubmitter", collector),
            };
            // Sent by the client's collector thread. At most one end for each pass that is expected.
            let completed: Recipient<Completed> = w.hand("PassSubmitter", collector);
            client.route_to(Box::new(move |ends| completed.do_send(Completed(ends))))?;
            Some((slot, client, peers))
        }
    };
    Ok(PassSlots {
        parts,
        submitter,
        worker: w.slot("PassWorker", WORK, 64),
        heartbeat: w.slot("HeartbeatWriter", CONTROL, 16),
        watchdog: w.slot("Watchdog", CONTROL, 64),
    })
}

#[cfg(target_os = "linux")]
impl PassSlots {
    fn start(
        self,
        arbiters: &Arbiters,
        deaths: &Deaths,
        running: &mut Vec<Running>,
    ) -> WiredPasses {
        let Self { parts, submitter, worker, heartbeat, watchdog } = self;
        let wired = WiredPasses {
            submitter: submitter.as_ref().map(|(slot, _, _)| slot.addr()),
            worker: worker.addr(),
            watchdog: watchdog.addr(),
        };
        let (host, reclaimer) = (parts.host.clone(), parts.reclaimer);
        running.push(
            watchdog.start(&arbiters.control, deaths, move |_| Watchdog::new(&host, reclaimer)),
        );
        let heart = Heart::new(&parts.host);
        running
            .push(heartbeat.start(&arbiters.control, deaths, move |_| HeartbeatWriter::new(heart)));
        running.push(worker.start(&arbiters.work, deaths, move |_| {
            PassWorker::new(parts.host, parts.registry, parts.worker, parts.threads)
        }));
        if let Some((slot, client, peers)) = submitter {
            running.push(
                slot.start(&arbiters.work, deaths, move |_| PassSubmitter::new(client, peers)),
            );
        }
        wired
    }
}

/// Everything that the wiring needs.
pub(crate) struct Parts {
    #[cfg(target_os = "linux")]
    pub(crate) passes: Option<PassParts>,
    pub(crate) config: Config,
    pub(crate) lease: LeaseConfig,
    pub(crate) identity: Arc<Identity>,
    pub(crate) advertised_gossip: std::net::SocketAddr,
    pub(crate) advertised_steal: std::net::SocketAddr,
    pub(crate) gossip: Bound,
    pub(crate) steal: TcpListener,
    pub(crate) store: StoreHandle,
    pub(crate) handlers: Arc<Handlers>,
    pub(crate) known_handlers: KnownHandlers,
    pub(crate) extensions: Extensions,
    pub(crate) links: Arc<dyn Links>,
    /// What the registration of this boot brought.
    pub(crate) registered: Registered,
    /// The holder's side of the lease that it granted.
    pub(crate) keeper: Keeper,
    /// Where actors report their end, the store's included.
    pub(crate) deaths: Deaths,
    pub(crate) reports: mpsc::UnboundedReceiver<Death>,
}

/// A node's actors, started.
pub(crate) struct Wired {
    pub(crate) record: WiringRecord,
    pub(crate) deaths: Deaths,
    /// In the order of their start; they are stopped in reverse.
    pub(crate) running: Vec<Running>,
    pub(crate) members: Addr<MembershipStore>,
    pub(crate) ring_keeper: Addr<RingKeeper>,
    pub(crate) deque: Addr<DequeOwner>,
    pub(crate) stealer: Addr<Stealer>,
    pub(crate) executor: Addr<TenantExecutor>,
    pub(crate) collector: Addr<ResultCollector>,
    pub(crate) table: Arc<ArcSwap<MemberTable>>,
    pub(crate) ring: Arc<ArcSwap<HashRing>>,
    pub(crate) load: Arc<LoadCell>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) stop: watch::Receiver<Option<StopReason>>,
    pub(crate) joining: watch::Receiver<Joining>,
    #[cfg(target_os = "linux")]
    pub(crate) passes: Option<WiredPasses>,
}

/// The addresses of a node, whose actors are still to be started.
struct Slots {
    overseer: Slot<Overseer>,
    socket: Slot<GossipSocket>,
    prober: Slot<SwimProber>,
    members: Slot<MembershipStore>,
    ring_keeper: Slot<RingKeeper>,
    lease_keeper: Slot<LeaseKeeper>,
    collector: Slot<ResultCollector>,
    deque: Slot<DequeOwner>,
    prefetcher: Slot<Prefetcher>,
    stealer: Slot<Stealer>,
    listener: Slot<StealListener>,
    executor: Slot<TenantExecutor>,
}

/// Makes every address, then every actor.
///
/// # Errors
///
/// The client of the passes gets no thread. Nothing was started.
pub(crate) fn wire(parts: Parts, arbiters: &Arbiters) -> Result<Wired, StartError> {
    let mut wiring = Wiring(WiringRecord::default());
    let w = &mut wiring;
    let slots = Slots {
        overseer: w.slot("Overseer", CONTROL, 64),
        socket: w.slot("GossipSocket", CONTROL, 1_024),
        prober: w.slot("SwimProber", CONTROL, 1_024),
        members: w.slot("MembershipStore", CONTROL, 256),
        ring_keeper: w.slot("RingKeeper", CONTROL, 256),
        lease_keeper: w.slot("LeaseKeeper", CONTROL, 64),
        collector: w.slot("ResultCollector", WORK, 1_024),
        deque: w.slot("DequeOwner", WORK, 4_096),
        prefetcher: w.slot("Prefetcher", WORK, 64),
        stealer: w.slot("Stealer", WORK, 256),
        listener: w.slot("StealListener", WORK, 16),
        executor: w.slot("TenantExecutor", TENANT, 1_024),
    };

    #[cfg(target_os = "linux")]
    let passes = match parts.passes {
        Some(passes) => Some(add_passes(w, passes, &slots.collector).map_err(PassesError::from)?),
        None => None,
    };

    let (config, identity, store) = (&parts.config, &parts.identity, &parts.store);
    let (deaths, reports) = (parts.deaths, parts.reports);
    let (stop_sender, stop) = watch::channel(None);
    let (joining_sender, joining) = watch::channel(Joining::default());
    let table = Arc::new(ArcSwap::from_pointee(MemberTable::default()));
    let ring = Arc::new(ArcSwap::from_pointee(HashRing::new(config.virtual_nodes)));
    let load = Arc::new(LoadCell::default());
    let metrics = Arc::new(Metrics::default());

    let transmit = parts.links.datagrams(w.hand::<_, Transmit>("SwimProber", &slots.socket));
    for from in ["DequeOwner", "ResultCollector", "TenantExecutor"] {
        w.edge::<Transmit>(from, "GossipSocket");
    }
    let hints = Hints::new(identity.clone(), metrics.clone(), table.clone(), transmit.clone());
    let dialler = parts.links.dialler();

    let socket_peers = gossip_socket::Peers {
        prober: w.hand("GossipSocket", &slots.prober),
        members: w.hand("GossipSocket", &slots.members),
        nudged: w.hand("GossipSocket", &slots.prefetcher),
        hinted: w.hand("GossipSocket", &slots.stealer),
        ended: w.hand("GossipSocket", &slots.collector),
    };
    let prober_peers = swim_prober::Peers {
        transmit,
        dial: w.hand("SwimProber", &slots.socket),
        heard: w.hand("SwimProber", &slots.members),
        verdict: w.hand("SwimProber", &slots.members),
    };
    let members_peers = membership_store::Peers {
        spread: w.hand("MembershipStore", &slots.prober),
        goodbye: w.hand("MembershipStore", &slots.prober),
        dial: w.hand("MembershipStore", &slots.socket),
        followers: vec![
            w.hand("MembershipStore", &slots.ring_keeper),
            w.hand("MembershipStore", &slots.lease_keeper),
            w.hand("MembershipStore", &slots.deque),
            w.hand("MembershipStore", &slots.prefetcher),
            w.hand("MembershipStore", &slots.stealer),
        ],
        loads: vec![w.hand("MembershipStore", &slots.stealer)],
        notices: w.hand("MembershipStore", &slots.overseer),
    };
    let lease_peers = lease_keeper::Peers {
        store: store.clone(),
        cancel: w.hand("LeaseKeeper", &slots.executor),
        clear: w.hand("LeaseKeeper", &slots.deque),
        known: w.hand("LeaseKeeper", &slots.deque),
        push: w.hand("LeaseKeeper", &slots.deque),
        forget: w.hand("LeaseKeeper", &slots.stealer),
        generation: w.hand("LeaseKeeper", &slots.members),
        notices: w.hand("LeaseKeeper", &slots.overseer),
        events: w.hand("LeaseKeeper", &slots.collector),
    };
    let collector_peers = result_collector::Peers { store: store.clone(), hints: hints.clone() };
    let deque_peers = deque_owner::Peers {
        store: store.clone(),
        run: w.hand("DequeOwner", &slots.executor),
        idle: w.hand("DequeOwner", &slots.prefetcher),
        nudged: w.hand("DequeOwner", &slots.prefetcher),
        hints: hints.clone(),
    };
    let prefetcher_peers = prefetcher::Peers {
        store: store.clone(),
        push: w.hand("Prefetcher", &slots.deque),
        lend: w.hand("Prefetcher", &slots.deque),
        room_back: w.hand("Prefetcher", &slots.deque),
        drained: w.hand("Prefetcher", &slots.deque),
        hungry: config.stealing.then(|| w.hand("Prefetcher", &slots.stealer)),
    };
    let stealer_peers = stealer::Peers {
        store: store.clone(),
        push: w.hand("Stealer", &slots.deque),
        room_back: w.hand("Stealer", &slots.deque),
        lend: w.hand("Stealer", &slots.deque),
        low_water: w.hand("Stealer", &slots.deque),
        events: w.hand("Stealer", &slots.collector),
    };
    let listener_peers = steal_listener::Peers {
        surrender: w.hand("StealListener", &slots.deque),
        settle: w.hand("StealListener", &slots.deque),
    };
    let executor_peers = tenant_executor::Peers {
        store: store.clone(),
        credit: w.hand("TenantExecutor", &slots.deque),
        events: w.hand("TenantExecutor", &slots.collector),
        hints,
    };
    let register = w.hand("Overseer", &slots.lease_keeper);

    let me = Member {
        id: identity.node.clone(),
        generation: identity.generation(),
        incarnation: Incarnation::default(),
        state: MemberState::Alive,
        gossip: parts.advertised_gossip,
        steal: parts.advertised_steal,
    };
    let detector = Detector::new(config.swim.clone(), me.clone(), fastrand::u64(..));
    let members = Members::new(config.swim.clone(), me, config.seeds.clone(), fastrand::u64(..));
    let dispatcher = Dispatcher::new(
        identity.node.clone(),
        DequeConfig {
            capacity: config.buffer,
            steal_threshold: config.steal_threshold,
            max_steal_batch: config.max_steal_batch,
            ..DequeConfig::default()
        },
    );
    let thief = Thief::new(
        identity.node.clone(),
        StealConfig {
            max_steal_batch: config.max_steal_batch,
            capacity: config.buffer,
            ..StealConfig::default()
        },
        fastrand::u64(..),
    );
    let prefetch = prefetch::Prefetcher::new(
        &identity.node,
        PrefetchConfig {
            capacity: config.buffer,
            poll_interval: config.poll_interval,
            protocol_period: config.swim.protocol_period,
        },
    );
    let lease_setup = lease_keeper::Setup {
        identity: identity.clone(),
        metrics: metrics.clone(),
        config: parts.lease,
        keeper: parts.keeper,
        registered: parts.registered,
        seed: fastrand::u64(..),
    };
    let limit = RateLimit::new(config.steal_rate_limit);

    let addresses = (
        slots.members.addr(),
        slots.ring_keeper.addr(),
        slots.deque.addr(),
        slots.stealer.addr(),
        slots.executor.addr(),
        slots.collector.addr(),
    );
    let mut running = Vec::new();
    let (control, work) = (&arbiters.control, &arbiters.work);

    running.push(slots.overseer.start(control, &deaths, move |_| {
        Overseer::new(stop_sender, joining_sender, reports, register)
    }));
    let shared = (identity.clone(), metrics.clone(), load.clone(), dialler);
    running.push(slots.deque.start(work, &deaths, {
        let setup = deque_owner::Setup {
            identity: identity.clone(),
            metrics: metrics.clone(),
            load: load.clone(),
            ring: ring.clone(),
            table: table.clone(),
            known_handlers: parts.known_handlers.clone(),
        };
        move |_| DequeOwner::new(dispatcher, setup, deque_peers)
    }));
    running.push(slots.collector.start(work, &deaths, {
        let identity = identity.clone();
        move |_| ResultCollector::new(identity, collector_peers)
    }));
    #[cfg(target_os = "linux")]
    let passes = passes.map(|passes| passes.start(arbiters, &deaths, &mut running));
    running.push(slots.executor.start(&arbiters.tenant, &deaths, {
        let setup = tenant_executor::Setup {
            identity: identity.clone(),
            metrics: metrics.clone(),
            load: load.clone(),
            handlers: parts.handlers.clone(),
            table: table.clone(),
            extensions: parts.extensions.clone(),
            slots: config.slots,
        };
        move |_| TenantExecutor::new(setup, executor_peers)
    }));
    running.push(slots.stealer.start(work, &deaths, {
        let (identity, metrics, load, dialler) = shared.clone();
        let setup = stealer::Setup { identity, metrics, load, dialler };
        move |_| Stealer::new(thief, setup, stealer_peers)
    }));
    running.push(slots.prefetcher.start(work, &deaths, {
        let setup = prefetcher::Setup { identity: identity.clone(), metrics: metrics.clone() };
        move |_| Prefetcher::new(prefetch, setup, prefetcher_peers)
    }));
    running.push(slots.listener.start(work, &deaths, {
        let (identity, metrics, _, _) = shared.clone();
        let (table, steal) = (table.clone(), parts.steal);
        let serves = config.stealing;
        move |_| StealListener::new(identity, metrics, table, steal, limit, serves, listener_peers)
    }));
    running.push(
        slots
            .lease_keeper
            .start(control, &deaths, move |_| LeaseKeeper::new(lease_setup, lease_peers)),
    );
    running.push(slots.ring_keeper.start(control, &deaths, {
        let (ring, metrics) = (ring.clone(), metrics.clone());
        move |_| RingKeeper::new(ring, metrics)
    }));
    running.push(slots.members.start(control, &deaths, {
        let table = table.clone();
        move |_| MembershipStore::new(members, table, members_peers)
    }));
    running.push(slots.prober.start(control, &deaths, {
        let load = load.clone();
        move |_| SwimProber::new(detector, load, prober_peers)
    }));
    running.push(slots.socket.start(control, &deaths, {
        let (identity, metrics, _, dialler) = shared;
        let gossip = parts.gossip;
        move |_| GossipSocket::new(identity, metrics, dialler, gossip, socket_peers)
    }));

    let (members, ring_keeper, deque, stealer, executor, collector) = addresses;
    Ok(Wired {
        record: wiring.0,
        deaths,
        running,
        members,
        ring_keeper,
        deque,
        stealer,
        executor,
        collector,
        table,
        ring,
        load,
        metrics,
        stop,
        joining,
        #[cfg(target_os = "linux")]
        passes,
    })
}
