//! From a configuration to a running node.

use std::any::{Any, TypeId};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use meshwork_actors::clock::{Clock, unix_ms};
use meshwork_actors::fair::runner::{Extensions, Handlers, Runner};
use meshwork_actors::identity::{Identity, Lease};
use meshwork_actors::mesh::gossip_socket;
use meshwork_actors::mesh::links::{Dialler, connect, expect_frame, write_frame};
use meshwork_actors::start::{Deaths, Running, Slot};
use meshwork_actors::store::memory::MemoryStore;
use meshwork_actors::store::messages::{LeaseOf, Register, Registered, StoreError, StoreHandle};
use meshwork_actors::work::deque_owner::KnownHandlers;
use meshwork_actors::work::enqueue::Job;
use meshwork_protocol::id::{Generation, HandlerName, NameError, NodeId};
use meshwork_protocol::lease::Keeper;
use meshwork_protocol::swim::Ask;
use meshwork_protocol::wire::datagram::{MeshId, Sender};
use meshwork_protocol::wire::stream::{Hello, ask_frames};

use crate::config::{Checked, Config, ConfigError};
use crate::handler::{JobHandler, JobOptions, TypedRunner};
use crate::links::{DirectLinks, Links};
use crate::mesh::{Mesh, Started};
#[cfg(target_os = "linux")]
use crate::passes::{PassWorkers, Passes, PassesBuilder, WorkerRunner};
use crate::placement::{Arbiters, Placement};
use crate::store::{Kind, Store};
#[cfg(target_os = "linux")]
use crate::wiring::PassParts;
use crate::wiring::{Parts, wire};

/// How long `start` waits for a seed to answer before it returns anyway: a seed that is down is not
/// fatal, and is tried again.
const JOIN_LIMIT: Duration = Duration::from_secs(3);

/// Messages that an embedded store's mailbox holds for senders who wait for room.
const STORE_BOUND: usize = 4_096;

/// Why a node did not start. Nothing of it is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no actix `System` on this thread.
    #[error(
        "no actix System runs on this thread: start the node under #[actix::main] or \
         #[actix_web::main], or call start_on_own_thread()"
    )]
    NoSystem,
    /// `start` was called on a thread of the `System` other than its first.
    #[error(
        "start() was called on a worker thread of the System. In the factory of HttpServer::new it \
         would start one node for each worker: start the mesh before HttpServer::new, and move a \
         clone into the factory. Elsewhere, call start_on_own_thread()"
    )]
    NotOnSystemArbiter,
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A handler's name is not a name.
    #[error("handler `{name}`: {error}")]
    HandlerName {
        /// What was given.
        name: String,
        /// Why.
        error: NameError,
    },
    /// Two handlers have one name.
    #[error("handler `{0}` is registered twice")]
    DuplicateHandler(String),
    /// A handler asks for data that was not given.
    #[error("handler `{handler}` takes Data<{missing}>, which was not given with .data(..)")]
    MissingData {
        /// Which handler.
        handler: String,
        /// Which type.
        missing: &'static str,
    },
    /// An address cannot be bound.
    #[error("{what} {addr}: {}", bind_text(source))]
    Bind {
        /// Which.
        what: &'static str,
        /// Where.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A thread for the node's actors cannot be made.
    #[error("a thread for the node's actors cannot be made: {0}")]
    Arbiter(io::Error),
    /// The store cannot be opened or used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another live node has this id.
    #[error(
        "node id `{id}` is in use: the node at {holder} answers to it; choose another id, or stop \
         that node first"
    )]
    IdInUse {
        /// The id.
        id: NodeId,
        /// Where the other answers.
        holder: SocketAddr,
    },
    /// The passes of the node cannot be used.
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Passes(#[from] crate::passes::PassesError),
    /// A handler runs in worker processes, and the node has no passes to reach them.
    #[cfg(target_os = "linux")]
    #[error("handler `{0}` runs in worker processes: give the builder .passes(..) too")]
    NoPasses(String),
    /// The node stopped while it started.
    #[error("the node stopped while it started: {0}")]
    Stopped(crate::StopReason),
}

fn bind_text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "the address is in use, by another node or program; choose another port".into()
        }
        io::ErrorKind::AddrNotAvailable => "this machine has no such address".into(),
        io::ErrorKind::PermissionDenied => {
            "this user may not bind it; ports under 1024 need privileges".into()
        }
        _ => error.to_string(),
    }
}

/// A node that is being configured.
#[must_use = "a node runs only after start()"]
pub struct MeshBuilder {
    config: Config,
    store: Store,
    placement: Placement,
    links: Arc<dyn Links>,
    data: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    jobs: Vec<Registration>,
    elsewhere: BTreeSet<String>,
    #[cfg(target_os = "linux")]
    passes: Option<PassesBuilder>,
    #[cfg(target_os = "linux")]
    in_workers: Vec<(&'static str, JobOptions)>,
}

struct Registration {
    name: &'static str,
    runner: Arc<dyn Runner>,
    missing: fn(&Extensions) -> Option<&'static str>,
}

impl MeshBuilder {
    pub(crate) fn new(id: &str) -> Self {
        Self {
            config: Config::new(id),
            store: Store::memory(),
            placement: Placement::default(),
            links: Arc::new(DirectLinks),
            data: HashMap::new(),
            jobs: Vec::new(),
            elsewhere: BTreeSet::new(),
            #[cfg(target_os = "linux")]
            passes: None,
            #[cfg(target_os = "linux")]
            in_workers: Vec::new(),
        }
    }

    /// The name of the mesh, which keeps meshes on one network apart. Default `meshwork`.
    pub fn mesh_name(mut self, name: impl Into<String>) -> Self {
        self.config.mesh_name = name.into();
        self
    }

    /// The address of the gossip port, UDP and TCP. Default `127.0.0.1:0`: any free port.
    pub fn bind(mut self, addr: impl Into<String>) -> Self {
        self.config.bind = addr.into();
        self
    }

    /// The address of the steal port, TCP. Default: any free port of the bound address.
    pub fn steal_bind(mut self, addr: impl Into<String>) -> Self {
        self.config.steal_bind = Some(addr.into());
        self
    }

    /// The gossip address that others are told, when it is not the bound one. A port of 0 stands for
    /// the bound port. The steal port is told with the same IP address.
    pub fn advertise(mut self, addr: impl Into<String>) -> Self {
        self.config.advertise = Some(addr.into());
        self
    }

    /// Allows addresses that others can reach, without a key: whoever reaches them can join.
    pub fn insecure(mut self) -> Self {
        self.config.insecure = true;
        self
    }

    /// A node to join, `host:port`. Names are resolved each time they are tried.
    pub fn seed(mut self, seed: impl Into<String>) -> Self {
        self.config.seeds.push(seed.into());
        self
    }

    /// Nodes to join.
    pub fn seeds(mut self, seeds: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.config.seeds.extend(seeds.into_iter().map(Into::into));
        self
    }

    /// The source of truth. Default: this node's memory.
    pub fn store(mut self, store: Store) -> Self {
        self.store = store;
        self
    }

    /// A value that handlers take as [`Data`](crate::Data), one of each type.
    pub fn data<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.data.insert(TypeId::of::<T>(), Arc::new(value));
        self
    }

    /// A handler, with default options.
    pub fn job<J, Args, H>(self, handler: H) -> Self
    where
        J: Job,
        Args: 'static,
        H: JobHandler<J, Args>,
    {
        self.job_with(handler, JobOptions::default())
    }

    /// A handler.
    pub fn job_with<J, Args, H>(mut self, handler: H, options: JobOptions) -> Self
    where
        J: Job,
        Args: 'static,
        H: JobHandler<J, Args>,
    {
        let runner = Arc::new(TypedRunner::<J, Args, H>::new(handler, options));
        self.jobs.push(Registration { name: J::NAME, runner, missing: H::missing });
        self
    }

    /// Passes that this node's jobs, and its user, hand to worker processes of the machine.
    #[cfg(target_os = "linux")]
    pub fn passes(mut self, passes: PassesBuilder) -> Self {
        self.passes = Some(passes);
        self
    }

    /// Jobs of this kind run in worker processes, by the handler that
    /// [`register_job`](crate::passes::RegisterJob::register_job) gives them: what crashes, leaks or
    /// spins there does so outside of the node. A worker that dies ends the attempt, and the job's
    /// retries are those of `options`; an attempt that runs into its time-out takes its worker's
    /// process with it. An attempt whose node has died, or has lost its lease, runs on in the worker
    /// beside the one that replaces it, until its time-out: what it writes is to be fenced, by
    /// [`JobCall::fencing_token`](crate::passes::JobCall::fencing_token). Needs
    /// [`passes`](Self::passes).
    #[cfg(target_os = "linux")]
    pub fn job_in_workers<J: Job>(mut self, options: JobOptions) -> Self {
        self.in_workers.push((J::NAME, options));
        self
    }

    /// Jobs of this kind may be enqueued here; other nodes run them. For nodes with no slots.
    pub fn job_elsewhere<J: Job>(mut self) -> Self {
        self.elsewhere.insert(J::NAME.into());
        self
    }

    /// Jobs that run here at once. Default: the number of processors. 0: this node only enqueues.
    ///
    /// Handlers are polled by one thread: what keeps it busy for long belongs in
    /// `tokio::task::spawn_blocking`.
    pub fn slots(mut self, slots: usize) -> Self {
        self.config.slots = slots;
        self
    }

    /// Jobs that this node holds claimed and unstarted. Default 64.
    pub fn buffer(mut self, jobs: usize) -> Self {
        self.config.buffer = jobs;
        self
    }

    /// At so many queued jobs, or fewer, the node looks for more. Default 2.
    pub fn steal_threshold(mut self, jobs: usize) -> Self {
        self.config.steal_threshold = jobs;
        self
    }

    /// Most jobs in one steal. Default 16.
    pub fn max_steal_batch(mut self, jobs: usize) -> Self {
        self.config.max_steal_batch = jobs;
        self
    }

    /// Steal requests a second that one peer may make. Default 10; 0: no limit.
    pub fn steal_rate_limit(mut self, per_second: u32) -> Self {
        self.config.steal_rate_limit = per_second;
        self
    }

    /// Whether this node steals, and is stolen from. Default yes.
    pub fn stealing(mut self, steals: bool) -> Self {
        self.config.stealing = steals;
        self
    }

    /// Points of each member on the hash ring; the same on every node. Default 150.
    pub fn virtual_nodes(mut self, points: u32) -> Self {
        self.config.virtual_nodes = points;
        self
    }

    /// How often an idle node asks the store for due jobs that nobody told it of. Default 1 s.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.config.poll_interval = interval;
        self
    }

    /// How long claims hold after the last renewal: also how long the jobs of a node that died wait.
    /// The same on every node. Default 15 s.
    pub fn lease_term(mut self, term: Duration) -> Self {
        self.config.lease_term = term;
        self
    }

    /// How often a node probes another. Default 500 ms.
    pub fn protocol_period(mut self, period: Duration) -> Self {
        self.config.swim.protocol_period = period;
        self
    }

    /// Which arbiters the node's actors run on.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// What stands between the node and its network.
    pub fn links(mut self, links: Arc<dyn Links>) -> Self {
        self.links = links;
        self
    }

    /// Starts the node on the present `System`.
    ///
    /// Returns when the node runs and a seed has answered; or, if none answers, after 3 seconds at
    /// most: seeds that are down are tried again for ever.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub async fn start(mut self) -> Result<Mesh, StartError> {
        let checked = self.config.check()?;
        let extensions = Extensions::new(std::mem::take(&mut self.data));
        #[cfg(target_os = "linux")]
        let passes = self.join_passes()?;
        let (handlers, known) = self.handlers(&extensions)?;
        on_system_arbiter().await?;

        if self.config.slots == 0 {
            // A node that runs nothing claims nothing and steals nothing.
            self.config.stealing = false;
            self.config.buffer = 0;
        }
        let bind = |what, addr| move |source| StartError::Bind { what, addr, source };
        let gossip = gossip_socket::bind(checked.bind).map_err(bind("bind", checked.bind))?;
        let steal = TcpListener::bind(checked.steal_bind)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(bind("steal_bind", checked.steal_bind))?;
        let steal_port = steal.local_addr().map_err(bind("steal_bind", checked.steal_bind))?.port();
        let (advertised_gossip, advertised_steal) = advertised(&checked, gossip.addr, steal_port);

        let arbiters = Arbiters::new(&self.placement).map_err(StartError::Arbiter)?;
        let (deaths, reports) = Deaths::new();
        let opened = open(&self.store, &arbiters, &deaths, self.config.lease_term).await;
        let (store, own_store) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                arbiters.stop();
                return Err(error);
            }
        };
        let mesh_id = MeshId::of(&self.config.mesh_name);
        let dialler = self.links.dialler();
        let registered = register(
            &store,
            &checked.id,
            mesh_id,
            advertised_gossip,
            dialler.as_ref(),
            &self.store,
        );
        let (registered, registered_at) = match registered.await {
            Ok(registered) => registered,
            Err(error) => {
                if let Some(own_store) = own_store {
                    deaths.expect();
                    own_store.stop().await;
                }
                arbiters.stop();
                return Err(error);
            }
        };

        let keeper = Keeper::new(checked.lease, registered_at);
        let lease = Lease { generation: registered.generation, deadline: keeper.deadline() };
        let identity =
            Arc::new(Identity::new(mesh_id, checked.id.clone(), advertised_gossip, lease));
        self.config.seeds.sort();
        self.config.seeds.dedup();
        let seeds = self.config.seeds.len();
        #[cfg(target_os = "linux")]
        let (client, registry) = passes
            .as_ref()
            .map(|passes| (passes.client.clone(), passes.registry.clone()))
            .unwrap_or_default();
        let parts = Parts {
            #[cfg(target_os = "linux")]
            passes,
            config: self.config,
            lease: checked.lease,
            identity: identity.clone(),
            advertised_gossip,
            advertised_steal,
            gossip,
            steal,
            store: store.clone(),
            handlers,
            known_handlers: known,
            extensions,
            links: self.links,
            keeper,
            registered,
            deaths,
            reports,
        };
        let wired = match wire(parts, &arbiters) {
            Ok(wired) => wired,
            Err(error) => {
                arbiters.stop();
                return Err(error);
            }
        };
        #[cfg(target_os = "linux")]
        let passes = wired.passes.as_ref().and_then(|passes| {
            let (worker, watchdog) = (passes.worker.clone(), passes.watchdog.clone());
            let workers = PassWorkers::of_node(registry, worker, watchdog);
            Some(Passes::new(client?, passes.submitter.clone()?, workers))
        });
        let mesh = Mesh::new(Started {
            #[cfg(target_os = "linux")]
            passes,
            identity,
            gossip: advertised_gossip,
            steal: advertised_steal,
            store,
            own_store,
            seeds,
            wired,
            arbiters,
        });
        if seeds > 0 {
            mesh.await_joined(JOIN_LIMIT).await?;
        }
        Ok(mesh)
    }

    /// Starts the node on a thread, and a `System`, of its own: for programs on plain tokio, and for
    /// callers that are not on their `System`'s first thread.
    ///
    /// # Errors
    /// As [`MeshBuilder::start`].
    pub async fn start_on_own_thread(self) -> Result<Mesh, StartError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let spawned = std::thread::Builder::new().name("meshwork".into()).spawn(move || {
            System::new().block_on(async move {
                let started = self.start().await;
                let mesh = started.as_ref().ok().cloned();
                let wanted = sender.send(started).is_ok();
                match mesh {
                    Some(mesh) if wanted => {
                        mesh.stopped().await;
                    }
                    // A caller who has given up wants no node.
                    Some(mesh) => {
                        mesh.drain(Duration::ZERO).await;
                    }
                    None => {}
                }
            });
        });
        spawned.map_err(StartError::Arbiter)?;
        receiver.await.unwrap_or(Err(StartError::Stopped(crate::StopReason::SystemEnded)))
    }

    /// Joins the passes, and registers the handlers that run by them.
    #[cfg(target_os = "linux")]
    fn join_passes(&mut self) -> Result<Option<PassParts>, StartError> {
        let passes = self.passes.take().map(|passes| passes.join(true)).transpose()?;
        let passes = passes.map(|(parts, _)| parts);
        for (name, options) in std::mem::take(&mut self.in_workers) {
            let client = passes.as_ref().and_then(|passes| passes.client.clone());
            let client = client.ok_or_else(|| StartError::NoPasses(name.into()))?;
            let runner = Arc::new(WorkerRunner::new(name, options, client));
            self.jobs.push(Registration { name, runner, missing: |_| None });
        }
        Ok(passes)
    }

    fn handlers(
        &mut self,
        extensions: &Extensions,
    ) -> Result<(Arc<Handlers>, KnownHandlers), StartError> {
        let mut handlers = Handlers::new();
        for Registration { name, runner, missing } in std::mem::take(&mut self.jobs) {
            let handler = HandlerName::new(name)
                .map_err(|error| StartError::HandlerName { name: name.into(), error })?;
            if let Some(missing) = missing(extensions) {
                return Err(StartError::MissingData { handler: name.into(), missing });
            }
            if handlers.insert(handler, runner).is_some() {
                return Err(StartError::DuplicateHandler(name.into()));
            }
        }
        let handlers = Arc::new(handlers);
        let elsewhere = std::mem::take(&mut self.elsewhere);
        let here = handlers.clone();
        let runs_jobs = self.config.slots > 0;
        let known = move |name: &HandlerName| {
            if here.contains_key(name) {
                Some(runs_jobs)
            } else {
                elsewhere.contains(name.as_str()).then_some(false)
            }
        };
        Ok((handlers, Arc::new(known)))
    }
}

/// The `System`'s own arbiter is the one thread of which there is one, whatever the user's servers
/// do.
async fn on_system_arbiter() -> Result<(), StartError> {
    let system = System::try_current().ok_or(StartError::NoSystem)?;
    if Arbiter::try_current().is_none() {
        return Err(StartError::NoSystem);
    }
    let (sender, receiver) = tokio::sync::oneshot::channel();
    system.arbiter().spawn_fn(move || {
        // The asker is right here, unless its future was dropped.
        let _ = sender.send(std::thread::current().id());
    });
    match receiver.await {
        Ok(thread) if thread == std::thread::current().id() => Ok(()),
        Ok(_) => Err(StartError::NotOnSystemArbiter),
        Err(_) => Err(StartError::NoSystem),
    }
}

fn advertised(checked: &Checked, bound: SocketAddr, steal_port: u16) -> (SocketAddr, SocketAddr) {
    let gossip = match checked.advertise {
        None => bound,
        Some(addr) if addr.port() == 0 => SocketAddr::new(addr.ip(), bound.port()),
        Some(addr) => addr,
    };
    let steal_ip = if checked.advertise.is_some() || checked.steal_bind.ip().is_unspecified() {
        gossip.ip()
    } else {
        checked.steal_bind.ip()
    };
    (gossip, SocketAddr::new(steal_ip, steal_port))
}

#[cfg_attr(
    not(feature = "sqlite"),
    allow(unused_variables, reason = "only a file has other writers to wait for")
)]
async fn open(
    store: &Store,
    arbiters: &Arbiters,
    deaths: &Deaths,
    lease_term: Duration,
) -> Result<(StoreHandle, Option<Running>), StartError> {
    match &store.0 {
        Kind::Shared(handle) => Ok((StoreHandle::clone(handle), None)),
        Kind::Memory => {
            let slot = Slot::<MemoryStore>::new("MemoryStore", STORE_BOUND);
            let handle = StoreHandle::of(&slot.addr());
            let running = slot.start(&arbiters.store, deaths, |_| MemoryStore::default());
            Ok((handle, Some(running)))
        }
        #[cfg(feature = "sqlite")]
        Kind::Sqlite { path, options } => {
            use meshwork_actors::store::sqlite::SqliteStore;
            let (path, mut options) = (path.clone(), options.clone());
            // A batch that waits longer than this for other writers would cost the lease.
            options.busy_wait = options.busy_wait.min(lease_term / 3);
            let opened = tokio::task::spawn_blocking(move || SqliteStore::open(&path, &options));
            let sqlite = opened
                .await
                .map_err(|e| StoreError::Failed(e.to_string()))?
                .map_err(|e| StoreError::Unusable(e.to_string()))?;
            let slot = Slot::<SqliteStore>::new("SqliteStore", STORE_BOUND);
            let handle = StoreHandle::of(&slot.addr());
            let running = slot.start(&arbiters.store, deaths, |_| sqlite);
            Ok((handle, Some(running)))
        }
    }
}

/// Registers a new boot, unless the store's record of the last one answers.
async fn register(
    store: &StoreHandle,
    id: &NodeId,
    mesh: MeshId,
    gossip: SocketAddr,
    dialler: &dyn Dialler,
    kind: &Store,
) -> Result<(Registered, meshwork_protocol::time::Instant), StartError> {
    let stopped = |_| StartError::Store(StoreError::Stopped);
    let last = store.lease_of.send(LeaseOf { node: id.clone() }).await.map_err(stopped)??;
    let over = last.as_ref().map_or(Generation(0), |row| row.owner.generation);
    if let Some(row) = last
        && !row.reaped
        && let Some(holder) = row.gossip
        && holder != gossip
        && answers_to(id, mesh, holder, dialler).await
    {
        return Err(StartError::IdInUse { id: id.clone(), holder });
    }
    // A store in memory forgets: the clock of day stands in for its counter.
    let at_least = match &kind.0 {
        Kind::Memory => Generation(unix_ms()),
        _ => Generation(1),
    };
    let registered_at = Clock.now();
    let register = Register { node: id.clone(), at_least, gossip: Some(gossip), over: Some(over) };
    let registered = match store.register.send(register).await.map_err(stopped)? {
        Err(StoreError::Taken(..)) => {
            // Two processes started with this id at once: the other was a moment faster.
            let row =
                store.lease_of.send(LeaseOf { node: id.clone() }).await.map_err(stopped)??;
            let holder = row.and_then(|row| row.gossip).unwrap_or(gossip);
            return Err(StartError::IdInUse { id: id.clone(), holder });
        }
        registered => registered?,
    };
    Ok((registered, registered_at))
}

/// Whether a node of this name answers at `holder`.
async fn answers_to(id: &NodeId, mesh: MeshId, holder: SocketAddr, dialler: &dyn Dialler) -> bool {
    let ask = async {
        let mut stream = connect(dialler, holder).await?;
        let asker = Sender { node: id.clone(), generation: Generation::default() };
        write_frame(&mut stream, &Hello::new(mesh, asker)).await?;
        for frame in ask_frames(&Ask::Ping) {
            write_frame(&mut stream, &frame).await?;
        }
        // The name is what counts: a node of another mesh greets too before it hangs up.
        let hello: Hello = expect_frame(&mut stream).await?;
        Ok::<_, meshwork_actors::mesh::links::LinkError>(hello.from.node == *id)
    };
    ask.await.unwrap_or(false)
}
