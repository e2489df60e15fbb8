//! `Watchdog`: finds dead workers and clients, and takes over what they left.
//!
//! Owns one observer's view of the heartbeat table, and a descriptor of each process that has
//! workers. Receives [`ScanNow`], [`WatchPasses`], [`FollowPasses`], its timer, the ends of processes.
//! Sends [`PassEvent`]s to whoever watches. On death the node stops; any other watchdog of the directory
//! does the same work.
//!
//! The end of a process is known at once from its descriptor, where it is of this namespace of
//! process numbers; else from a heart that stands still. Either only says whose lock to look at.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use actix::prelude::*;
use meshwork_protocol::limits::{PASS_TEND_EVERY, PASS_WATCH_EVERY};
use meshwork_protocol::pass::PassId;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::pass_host::PassHost;
use super::process::ProcessIdentity;
use super::reclaimer::{ReclaimReport, Reclaimer, ReclaimerOptions, WorkerSeen};
use crate::clock::Clock;

/// Something that happened to workers or passes of the directory. Several watchdogs tell of the same
/// worker; of a pass, the one that took it over. A worker that joins in a dead one's row takes over
/// before any watchdog does: those passes are in the counters of
/// [`PassSnapshot`](super::snapshot::PassSnapshot) alone.
#[derive(Clone, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
#[non_exhaustive]
pub enum PassEvent {
    /// A worker is there.
    WorkerJoined(WorkerSeen),
    /// A worker is gone: it died, or left.
    WorkerLost(WorkerSeen),
    /// A worker's process was killed because a pass ran past its deadline.
    WorkerKilled(WorkerSeen),
    /// A pass ran past its deadline in a process that cannot be killed from here.
    WorkerHung(WorkerSeen),
    /// A pass of a dead worker waits to be run again.
    PassReclaimed(PassId),
    /// A pass killed the last worker that it may.
    PassPoisoned(PassId),
}

/// Tell this recipient of what happens. The workers that are there come first. One whose mailbox is
/// full misses events.
#[derive(Message)]
#[rtype(result = "()")]
pub struct WatchPasses(pub Recipient<PassEvent>);

/// As [`WatchPasses`], into a channel.
#[derive(Message)]
#[rtype(result = "()")]
pub struct FollowPasses(pub mpsc::Sender<PassEvent>);

/// Who is told.
enum Watcher {
    Actor(Recipient<PassEvent>),
    Channel(mpsc::Sender<PassEvent>),
}

impl Watcher {
    /// Whether it is still there. One that has no room misses the event.
    fn tell(&self, event: PassEvent) -> bool {
        match self {
            Self::Actor(recipient) => {
                !matches!(recipient.try_send(event), Err(SendError::Closed(_)))
            }
            Self::Channel(sender) => {
                !matches!(sender.try_send(event), Err(TrySendError::Closed(_)))
            }
        }
    }
}

/// Look at everything now.
#[derive(Message)]
#[rtype(result = "Result<ReclaimReport, ScanError>")]
pub struct ScanNow;

/// Why a scan was not made.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the lock file cannot be used: {0}")]
pub struct ScanError(String);

/// The process of some workers has ended.
#[derive(Message)]
#[rtype(result = "()")]
struct Ended(ProcessIdentity);

/// The actor.
pub struct Watchdog {
    host: Arc<PassHost>,
    reclaimer: Reclaimer,
    watched: HashMap<ProcessIdentity, SpawnHandle>,
    watchers: Vec<Watcher>,
    file_is_removed: bool,
}

impl Watchdog {
    /// A watchdog of the directory that this host has open.
    pub fn new(host: &Arc<PassHost>, options: ReclaimerOptions) -> Self {
        Self {
            host: Arc::clone(host),
            reclaimer: Reclaimer::new(host, options),
            watched: HashMap::new(),
            watchers: Vec::new(),
            file_is_removed: false,
        }
    }

    fn look(&mut self, ctx: &mut Context<Self>) {
        let mut report = ReclaimReport::default();
        // A grace of hundreds of milliseconds needs no finer clock.
        let looked = self.reclaimer.look(Clock.coarse(), &mut report);
        self.reclaimer.kill_overdue(Clock.now(), &mut report);
        if let Err(error) = looked {
            tracing::error!(%error, "the lock file of the passes cannot be used");
        }
        self.tell(&report, ctx);
    }

    fn tend(&mut self, ctx: &mut Context<Self>) -> Result<ReclaimReport, ScanError> {
        let mut report = ReclaimReport::default();
        self.see_the_file();
        let tended = self.reclaimer.tend(&mut report);
        self.reclaimer.kill_overdue(Clock.now(), &mut report);
        self.tell(&report, ctx);
        tended.map(|()| report).map_err(|error| ScanError(error.to_string()))
    }

    /// Says once that the file was removed under those who use it.
    fn see_the_file(&mut self) {
        let Some(file) = self.host.ring().file() else { return };
        if !self.file_is_removed && file.is_removed().unwrap_or(false) {
            self.file_is_removed = true;
            tracing::error!(
                file = %file.path().display(),
                "the pass file was removed: whoever opens the directory now is not among us; restart \
                 every process of it"
            );
        }
    }

    fn tell(&mut self, report: &ReclaimReport, ctx: &mut Context<Self>) {
        for joined in &report.joined {
            self.watch(joined.process, ctx);
        }
        let events = report
            .lost
            .iter()
            .cloned()
            .map(PassEvent::WorkerLost)
            .chain(report.joined.iter().cloned().map(PassEvent::WorkerJoined))
            .chain(report.killed.iter().cloned().map(PassEvent::WorkerKilled))
            .chain(report.hung.iter().cloned().map(PassEvent::WorkerHung))
            .chain(report.requeued.iter().copied().map(PassEvent::PassReclaimed))
            .chain(report.poisoned.iter().copied().map(PassEvent::PassPoisoned));
        for event in events {
            tracing::debug!(?event, "passes");
            self.watchers.retain(|watcher| watcher.tell(event.clone()));
        }
    }

    fn add(&mut self, watcher: Watcher) {
        for worker in self.reclaimer.workers() {
            // A watcher that has no room for what is there gets what comes.
            watcher.tell(PassEvent::WorkerJoined(worker.clone()));
        }
        self.watchers.push(watcher);
    }

    /// Waits for the end of a process, to look at its workers' locks at once.
    fn watch(&mut self, process: ProcessIdentity, ctx: &mut Context<Self>) {
        if process == self.host.process() || self.watched.contains_key(&process) {
            return;
        }
        let me = ctx.address();
        match process.open(&self.host.process()).map(awaited) {
            Some(Ok(ended)) => {
                let wait = async move {
                    wait_for(ended).await;
                    me.do_send(Ended(process));
                };
                self.watched.insert(process, ctx.spawn(wait.into_actor(self)));
            }
            // Its heart will tell.
            Some(Err(error)) => tracing::warn!(%error, "the end of a process cannot be awaited"),
            None => {}
        }
    }
}

#[expect(
    deprecated,
    reason = "deprecated for descriptors that nobody owns; its successor is unsafe"
)]
fn awaited(process: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(process)
}

async fn wait_for(ended: AsyncFd<OwnedFd>) {
    // An error would be of the reactor's end.
    let _ = ended.readable().await;
}

impl Actor for Watchdog {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Err(error) = self.tend(ctx) {
            tracing::error!(%error, "passes");
        }
        ctx.run_interval(PASS_WATCH_EVERY, Self::look);
        ctx.run_interval(PASS_TEND_EVERY, |watchdog, ctx| {
            if let Err(error) = watchdog.tend(ctx) {
                tracing::error!(%error, "passes");
            }
        });
    }
}

impl Handler<Ended> for Watchdog {
    type Result = ();

    fn handle(&mut self, Ended(process): Ended, ctx: &mut Self::Context) {
        self.watched.remove(&process);
        let mut report = ReclaimReport::default();
        if let Err(error) = self.reclaimer.process_ended(process, &mut report) {
            tracing::error!(%error, "the lock file of the passes cannot be used");
        }
        self.tell(&report, ctx);
    }
}

impl Handler<ScanNow> for Watchdog {
    type Result = Result<ReclaimReport, ScanError>;

    fn handle(&mut self, _: ScanNow, ctx: &mut Self::Context) -> Self::Result {
        self.tend(ctx)
    }
}

impl Handler<WatchPasses> for Watchdog {
    type Result = ();

    fn handle(&mut self, WatchPasses(watcher): WatchPasses, _: &mut Self::Context) {
        self.add(Watcher::Actor(watcher));
    }
}

impl Handler<FollowPasses> for Watchdog {
    type Result = ();

    fn handle(&mut self, FollowPasses(watcher): FollowPasses, _: &mut Self::Context) {
        self.add(Watcher::Channel(watcher));
    }
}
