//! Passes: small calls to worker processes of the same machine, through shared memory.
//!
//! One process opens a directory as a client, others as workers (or one as both); whoever has
//! [`Passes`] open recovers what dead ones leave.
//!
//! ```no_run
//! use meshwork::passes::{Pass, PassRegistry, Passes};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let registry = PassRegistry::new();
//! registry.register("reverse", |call| {
//!     Ok::<_, String>(call.args.iter().rev().copied().collect::<Vec<u8>>())
//! })?;
//! let passes = Passes::builder("/run/user/1000/app").registry(registry).workers(2).start().await?;
//! let end = passes.call(Pass::named("reverse", b"abc".as_slice())).await?;
//! assert_eq!(end.outcome.into_result()?, b"cba");
//! passes.leave().await;
//! # Ok(())
//! # }
//! ```

mod jobs;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::Stream;
use meshwork_actors::start::{Deaths, Running};
use tokio::sync::{Mutex, mpsc, watch};

pub use meshwork_actors::host::mapped_file::OpenError;
pub use meshwork_actors::host::pass::{Completion, Pass, PassError, PassOutcome, SubmitError};
pub use meshwork_actors::host::pass_client::{CallError, ClientOptions, PassClient};
pub use meshwork_actors::host::pass_host::{JoinError, PassHost};
pub use meshwork_actors::host::pass_submitter::{Cancel, PassSubmitter, Submit, SubmitBatch};
pub use meshwork_actors::host::pass_worker::{AddWorkers, PassWorker, RegisterPass, StopWorkers};
pub use meshwork_actors::host::reclaimer::{ReclaimReport, ReclaimerOptions, WorkerSeen};
pub use meshwork_actors::host::registry::{
    PassCall, PassRegistry, PassReply, RegisterError, Registered,
};
pub use meshwork_actors::host::snapshot::{
    ClientSnapshot, InFlight, PassCounters, PassRates, PassSnapshot, Presence, RunningPass,
    WorkerSnapshot,
};
pub use meshwork_actors::host::watchdog::{
    FollowPasses, PassEvent, ScanError, ScanNow, WatchPasses, Watchdog,
};
pub use meshwork_actors::host::worker_thread::{WorkerOptions, WorkerThread};
pub use meshwork_protocol::pass::layout::Geometry;
pub use meshwork_protocol::pass::patience::Spin;
pub use meshwork_protocol::pass::{ClientIndex, ClosureId, PassId, Priority, WorkerIndex};

pub(crate) use jobs::WorkerRunner;
pub use jobs::{JobCall, RegisterJob};
pub use worker::worker_main;

use crate::placement::{Arbiters, Placement};
use crate::wiring::{PassParts, WiredPasses, WiringRecord, wire_passes};

/// Events that wait for a reader of [`Passes::events`].
const EVENTS_WAITING: usize = 256;

/// Why passes did not start. Nothing of them is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PassesError {
    /// There is no actix `System` on this thread.
    #[error("no actix System runs on this thread: start passes under #[actix::main]")]
    NoSystem,
    /// The directory cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is no place left in it.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A thread for the actors cannot be made.
    #[error("a thread for the actors of the passes cannot be made: {0}")]
    Arbiter(std::io::Error),
}

/// A directory of passes that is being configured.
#[derive(Clone, Debug)]
#[must_use = "passes run only after start()"]
pub struct PassesBuilder {
    directory: PathBuf,
    geometry: Option<Geometry>,
    registry: PassRegistry,
    workers: usize,
    worker: WorkerOptions,
    client: ClientOptions,
    reclaimer: ReclaimerOptions,
    placement: Placement,
}

impl PassesBuilder {
    fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            geometry: None,
            registry: PassRegistry::new(),
            workers: 0,
            worker: WorkerOptions::default(),
            client: ClientOptions::default(),
            reclaimer: ReclaimerOptions::default(),
            placement: Placement::default(),
        }
    }

    /// What this process is called, in up to 48 bytes: by its workers, and by its client. When a
    /// client dies, its replies wait for the next of its name. Default: none.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.client.name = name.into();
        self.worker.name.clone_from(&self.client.name);
        self
    }

    /// What the directory's file is made for, and must have been made for. Default: what it was made
    /// for, or 16 clients of 512 slots, 64 workers, 64 KiB.
    pub fn geometry(mut self, geometry: Geometry) -> Self {
        self.geometry = Some(geometry);
        self
    }

    /// The closures that workers of this process run.
    pub fn registry(mut self, registry: PassRegistry) -> Self {
        self.registry = registry;
        self
    }

    /// Worker threads of this process. Default 0: it submits, and others work.
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// What a worker does while there is nothing to do.
    pub fn spin(mut self, spin: Spin) -> Self {
        self.worker.spin = spin;
        self
    }

    /// How long a pass waits while no living worker has its closure. Default 5 s.
    pub fn no_worker_after(mut self, limit: Duration) -> Self {
        self.client.no_worker_after = limit;
        self
    }

    /// How long the replies of a dead client wait for one of its name. Default 60 s.
    pub fn orphans_after(mut self, limit: Duration) -> Self {
        self.reclaimer.orphans_after = limit;
        self
    }

    /// Which arbiters the actors run on.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Opens the directory and joins it, as workers, and as a client if it `submits`.
    pub(crate) fn join(self, submits: bool) -> Result<(PassParts, Placement), PassesError> {
        let host = PassHost::open(&self.directory, self.geometry)?;
        let client = submits.then(|| PassClient::join(&host, self.client)).transpose()?;
        let threads = PassWorker::threads(&host, &self.registry, &self.worker, self.workers)?;
        let parts = PassParts {
            host,
            client,
            registry: self.registry,
            worker: self.worker,
            threads,
            reclaimer: self.reclaimer,
        };
        Ok((parts, self.placement))
    }

    /// Starts on the present `System`. Opening the directory blocks the thread: for microseconds, and
    /// for up to half a minute where another process was stopped while it made the file.
    ///
    /// # Errors
    ///
    /// [`PassesError`]; nothing is left running.
    pub async fn start(self) -> Result<Passes, PassesError> {
        let (submitting, workers) = self.start_as(true)?;
        let (client, submitter) = submitting.expect("whoever submits has a client");
        Ok(Passes::new(client, submitter, workers))
    }

    /// Starts workers alone on the present `System`: this process takes no place as a client.
    ///
    /// # Errors
    ///
    /// [`PassesError`]; nothing is left running.
    pub async fn start_workers(self) -> Result<PassWorkers, PassesError> {
        self.start_as(false).map(|(_, workers)| workers)
    }

    fn start_as(self, submits: bool) -> Result<(Option<Submitting>, PassWorkers), PassesError> {
        System::try_current().ok_or(PassesError::NoSystem)?;
        let (parts, placement) = self.join(submits)?;
        let arbiters = Arbiters::of_passes(&placement).map_err(PassesError::Arbiter)?;
        let (deaths, reports) = Deaths::new();
        let (client, registry) = (parts.client.clone(), parts.registry.clone());
        let (wired, record, running) = wire_passes(parts, &arbiters, &deaths)?;
        let (stop, stopped) = watch::channel(None);
        actix::spawn(watch_deaths(reports, stop));
        let own = Own { running: Mutex::new(Some((running, deaths, arbiters))), stopped, record };
        let WiredPasses { submitter, worker, watchdog } = wired;
        let workers = PassWorkers(Arc::new(Inner { registry, worker, watchdog, own: Some(own) }));
        Ok((client.zip(submitter), workers))
    }
}

/// The two ways to submit: without a mailbox, and by one.
type Submitting = (PassClient, Addr<PassSubmitter>);

/// The first actor that ends by itself ends them all.
async fn watch_deaths(
    mut reports: mpsc::UnboundedReceiver<meshwork_actors::start::Death>,
    stop: watch::Sender<Option<String>>,
) {
    if let Some(death) = reports.recv().await {
        tracing::error!(actor = death.actor, reason = %death.reason, "the passes stop");
        stop.send_replace(Some(format!("{}: {}", death.actor, death.reason)));
    }
}

/// The workers of this process in a directory of passes. Clones are the same.
#[derive(Clone)]
pub struct PassWorkers(Arc<Inner>);

struct Inner {
    registry: PassRegistry,
    worker: Addr<PassWorker>,
    watchdog: Addr<Watchdog>,
    /// Where they are not part of a node.
    own: Option<Own>,
}

struct Own {
    running: Mutex<Option<(Vec<Running>, Deaths, Arbiters)>>,
    stopped: watch::Receiver<Option<String>>,
    record: WiringRecord,
}

impl std::fmt::Debug for PassWorkers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PassWorkers({:?})", self.0.registry)
    }
}

impl PassWorkers {
    /// The workers of a node, which end with it.
    pub(crate) fn of_node(
        registry: PassRegistry,
        worker: Addr<PassWorker>,
        watchdog: Addr<Watchdog>,
    ) -> Self {
        Self(Arc::new(Inner { registry, worker, watchdog, own: None }))
    }

    /// The closures that they run.
    pub fn registry(&self) -> &PassRegistry {
        &self.0.registry
    }

    /// Takes [`RegisterPass`], [`AddWorkers`] and [`StopWorkers`].
    pub fn address(&self) -> &Addr<PassWorker> {
        &self.0.worker
    }

    /// Takes [`WatchPasses`], [`FollowPasses`] and [`ScanNow`].
    pub fn watchdog(&self) -> &Addr<Watchdog> {
        &self.0.watchdog
    }

    /// What happens to the workers and passes of the directory: the workers that are there first,
    /// then each event. A reader that lets 256 wait misses those that follow. Ends with the
    /// watchdog.
    pub fn events(&self) -> impl Stream<Item = PassEvent> + Send + Unpin + use<> {
        let (sender, mut receiver) = mpsc::channel(EVENTS_WAITING);
        self.0.watchdog.do_send(FollowPasses(sender));
        futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx))
    }

    /// What the actors are and who knows whom; `None` where a node has them.
    pub fn wiring(&self) -> Option<&WiringRecord> {
        self.0.own.as_ref().map(|own| &own.record)
    }

    /// Leaves: waits until each worker has ended the pass that it runs, and stops the actors. Passes
    /// that were submitted run on in other processes. Of a node's passes, nothing: they end with the
    /// node.
    ///
    /// A closure that hangs, in a pass without a deadline, is waited for without end: give up by a
    /// time-out around this, and end the process. Its passes then run elsewhere.
    ///
    /// Until this is called they run on, also when every handle was dropped. A second call waits for
    /// the first.
    pub async fn leave(&self) {
        let Some(own) = &self.0.own else { return };
        let mut held = own.running.lock().await;
        let Some((running, deaths, arbiters)) = held.take() else { return };
        // Before the hearts stop. An error is an actor that has ended already.
        let _ = self.0.worker.send(StopWorkers).await;
        deaths.expect();
        for actor in running.into_iter().rev() {
            actor.stop().await;
        }
        arbiters.stop();
    }

    /// Waits until an actor has ended by itself, and says which and why. `None` where a node has
    /// them, or after [`leave`](Self::leave).
    pub async fn failed(&self) -> Option<String> {
        let mut stopped = self.0.own.as_ref()?.stopped.clone();
        let failed = stopped.wait_for(Option::is_some).await.ok()?;
        failed.clone()
    }
}

/// The passes of a directory, running in this process. Clones are the same.
#[derive(Clone, Debug)]
pub struct Passes {
    client: PassClient,
    submitter: Addr<PassSubmitter>,
    workers: PassWorkers,
}

impl Passes {
    /// The passes of a directory, to be configured and started. The directory is made if it is not
    /// there; on a filesystem in memory (`/dev/shm`, `/run`) passes never wait for a disk.
    pub fn builder(directory: impl Into<PathBuf>) -> PassesBuilder {
        PassesBuilder::new(directory.into())
    }

    pub(crate) fn new(
        client: PassClient,
        submitter: Addr<PassSubmitter>,
        workers: PassWorkers,
    ) -> Self {
        Self { client, submitter, workers }
    }

    /// The direct handle: submits and collects without a mailbox in the way.
    pub fn client(&self) -> &PassClient {
        &self.client
    }

    /// Submits a pass by the direct handle, and awaits its end. Waits for room while all slots are in
    /// use.
    ///
    /// # Errors
    ///
    /// [`CallError`].
    pub async fn call(&self, pass: Pass<'_>) -> Result<Completion<'static>, CallError> {
        self.client.call(&pass).await
    }

    /// Takes [`Submit`] and [`SubmitBatch`].
    pub fn submitter(&self) -> &Addr<PassSubmitter> {
        &self.submitter
    }

    /// The workers of this process, their registry, and the watchdog.
    pub fn workers(&self) -> &PassWorkers {
        &self.workers
    }

    /// As [`PassWorkers::events`].
    pub fn events(&self) -> impl Stream<Item = PassEvent> + Send + Unpin + use<> {
        self.workers.events()
    }

    /// As [`PassWorkers::leave`]. The place as a client is given up with the last handle.
    pub async fn leave(&self) {
        self.workers.leave().await;
    }

    /// As [`PassWorkers::failed`].
    pub async fn failed(&self) -> Option<String> {
        self.workers.failed().await
    }
}
