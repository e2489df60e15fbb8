//! `TenantExecutor`: runs handlers.
//!
//! Owns the running handlers, at most `slots` of them. Receives [`Run`] from the deque's owner,
//! against the credits that it granted, and [`CancelAll`] when the lease was lost. Sends `Start` and
//! `Finish` to the store, [`Credit`] to the deque's owner, [`JobEvent`] to the result collector.
//!
//! It grants more credits than it has slots ([`CreditLine`]), so that the commit of a job's start hides
//! behind the jobs that run. A slot frees when the handler has returned, not when its end is
//! committed. Panics end the attempt, not the executor. On death the node stops.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Cx, Poll};
use std::time::Duration;

use actix::prelude::*;
use arc_swap::ArcSwap;
use futures_util::FutureExt;
use meshwork_protocol::credit::CreditLine;
use meshwork_protocol::id::Generation;
use meshwork_protocol::job::{AttemptEnd, ClaimedJob, Disposition, Recorded, RetryPolicy};
use meshwork_protocol::time::Instant;
use meshwork_protocol::wire::datagram::Body;

use crate::clock::Clock;
use crate::fair::runner::{Attempt, Extensions, Handlers};
use crate::identity::Identity;
use crate::load_cell::LoadCell;
use crate::mesh::hints::Hints;
use crate::metrics::Metrics;
use crate::start::panic_text;
use crate::store::messages::{Ended, Finish, Release, Start, StoreError, StoreHandle};
use crate::subscribers::MemberTable;
use crate::work::deque_owner::Credit;
use crate::work::job_events::JobEvent;

/// Delay before an end that could not be recorded is recorded again.
const RECORD_AGAIN: Duration = Duration::from_millis(100);

/// How long a job that no handler here can run is kept before it is given back.
const FOREIGN_PAUSE: Duration = Duration::from_secs(1);

/// Run this job, against one credit.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Run {
    /// The job and the claim to run it by.
    pub job: ClaimedJob,
    /// How long it was in the deque.
    pub waited: Duration,
    /// Whether it came from another node's deque.
    pub stolen: bool,
}

/// Drop every handler: the claims they run by hold no longer.
#[derive(Message)]
#[rtype(result = "()")]
pub struct CancelAll;

/// Answered when no job is here any more, in whatever state.
#[derive(Message)]
#[rtype(result = "()")]
pub struct AwaitIdle;

#[derive(Message)]
#[rtype(result = "()")]
struct StartAnswered {
    serial: u64,
    may_run: bool,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Returned {
    serial: u64,
    end: Option<AttemptEnd>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Recording {
    serial: u64,
    result: Result<bool, StoreError>,
}

/// Whom the executor tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// `DequeOwner`.
    pub credit: Recipient<Credit>,
    /// `ResultCollector`.
    pub events: Recipient<JobEvent>,
    /// Other nodes.
    pub hints: Hints,
}

/// What the executor is built with.
pub struct Setup {
    /// Who this node is.
    pub identity: Arc<Identity>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
    /// Where it says how busy it is.
    pub load: Arc<LoadCell>,
    /// What it can run.
    pub handlers: Arc<Handlers>,
    /// Who else there is.
    pub table: Arc<ArcSwap<MemberTable>>,
    /// What handlers share.
    pub extensions: Extensions,
    /// How many run at once, at least 1.
    pub slots: usize,
}

/// The actor.
pub struct TenantExecutor {
    setup: Setup,
    clock: Clock,
    jobs: HashMap<u64, Held>,
    next_serial: u64,
    /// May run, and wait for a slot.
    ready: VecDeque<u64>,
    running: usize,
    /// Starting, ready or running: what a thief would have to wait for.
    in_hand: usize,
    credits: CreditLine,
    idle_waiters: Vec<tokio::sync::oneshot::Sender<()>>,
    peers: Peers,
}

struct Held {
    job: Arc<ClaimedJob>,
    /// The boot whose claim it is.
    generation: Generation,
    waited: Duration,
    stolen: bool,
    stage: Stage,
}

enum Stage {
    Starting { since: Instant },
    Ready,
    Running { since: Instant, handle: tokio::task::JoinHandle<()> },
    Recording { disposition: Disposition, ran: Duration },
}

impl TenantExecutor {
    /// An executor with all its slots free.
    pub fn new(setup: Setup, peers: Peers) -> Self {
        Self {
            credits: CreditLine::new(setup.slots),
            setup,
            clock: Clock,
            jobs: HashMap::new(),
            next_serial: 0,
            ready: VecDeque::new(),
            running: 0,
            in_hand: 0,
            idle_waiters: Vec::new(),
            peers,
        }
    }

    fn tell_load(&self) {
        self.setup.load.set_executor(self.in_hand, self.setup.slots, self.credits.service_us());
    }

    /// So many jobs have left: others may come.
    fn left(&mut self, jobs: usize) {
        self.credits.give_back(jobs);
        let more = self.credits.grant();
        if more > 0 {
            self.peers.credit.do_send(Credit(more));
        }
    }

    /// A job that this node has no handler for is another's to run: it costs no attempt. It is kept
    /// for a while, so that nodes that all lack the handler do not pass it around, and then given to
    /// any other member.
    fn give_back(&mut self, job: &ClaimedJob, ctx: &mut Context<Self>) {
        let handler = &job.spec.handler;
        tracing::warn!(%handler, job = %job.spec.id, "no such handler here: the job is given back");
        let me = &self.setup.identity.node;
        let table = self.setup.table.load();
        let others: Vec<_> = table.present().map(|m| &m.id).filter(|id| *id != me).collect();
        let to = fastrand::choice(others).cloned();
        let release = Release {
            owner: self.setup.identity.owner(),
            claims: vec![job.claim()],
            to: to.clone(),
        };
        ctx.run_later(FOREIGN_PAUSE, move |executor, _| {
            let release = executor.peers.store.release.send(release);
            let hints = executor.peers.hints.clone();
            actix::spawn(async move {
                if let (Ok(Ok(1..)), Some(to)) = (release.await, to) {
                    hints.send(&to, Body::Nudge);
                }
            });
            executor.left(1);
        });
    }

    fn forget(&mut self, serial: u64) {
        self.jobs.remove(&serial);
        if self.jobs.is_empty() {
            for waiter in self.idle_waiters.drain(..) {
                // Whoever waited may have given up.
                let _ = waiter.send(());
            }
        }
    }

    fn fill_slots(&mut self, ctx: &mut Context<Self>) {
        while self.running < self.setup.slots {
            let Some(serial) = self.ready.pop_front() else { break };
            self.run(serial, ctx);
        }
        self.tell_load();
    }

    fn run(&mut self, serial: u64, ctx: &mut Context<Self>) {
        let Some(held) = self.jobs.get_mut(&serial) else { return };
        let attempt = Attempt {
            job: held.job.clone(),
            node: self.setup.identity.node.clone(),
            stolen: held.stolen,
            extensions: self.setup.extensions.clone(),
        };
        let runner = self.setup.handlers.get(&held.job.spec.handler).cloned();
        let leased = Leased {
            identity: self.setup.identity.clone(),
            generation: held.generation,
            clock: self.clock,
            // The handler's own code runs inside the future, so its panics are caught too.
            inner: async move {
                let Some(runner) = runner else {
                    let error = format!("{} has no handler of this name", attempt.node);
                    return AttemptEnd::Retry { error, after: None };
                };
                let limit = runner.timeout();
                let run = AssertUnwindSafe(async move { runner.run(attempt).await }).catch_unwind();
                let end = match limit {
                    None => run.await,
                    Some(limit) => match tokio::time::timeout(limit, run).await {
                        Ok(end) => end,
                        Err(_) => return AttemptEnd::TimedOut(limit),
                    },
                };
                end.unwrap_or_else(|panic| AttemptEnd::Panicked(panic_text(panic.as_ref())))
            }
            .boxed_local(),
        };
        let me = ctx.address();
        let handle = actix::spawn(async move {
            let end = leased.await;
            me.do_send(Returned { serial, end });
        });
        held.stage = Stage::Running { since: self.clock.now(), handle };
        self.running += 1;
        self.setup.metrics.jobs_started.increment();
        self.peers.events.do_send(JobEvent::Started {
            job: held.job.spec.id,
            attempt: held.job.attempt,
            stolen: held.stolen,
            waited: held.waited,
        });
    }

    fn record(&self, serial: u64, ctx: &mut Context<Self>) {
        let Some(Held { job, stage: Stage::Recording { disposition, .. }, .. }) =
            self.jobs.get(&serial)
        else {
            return;
        };
        let ended = vec![Ended { claim: job.claim(), disposition: disposition.clone() }];
        let finish = self.peers.store.finish.send(Finish { ended });
        let me = ctx.address();
        actix::spawn(async move {
            let result = match finish.await {
                Ok(Ok(recorded)) => Ok(recorded.first().copied().unwrap_or(false)),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(StoreError::Stopped),
            };
            me.do_send(Recording { serial, result });
        });
    }

    fn recorded(&mut self, serial: u64) {
        let Some(Held { job, stolen, stage: Stage::Recording { disposition, ran }, .. }) =
            self.jobs.remove(&serial)
        else {
            return;
        };
        let metrics = &self.setup.metrics;
        let (recorded, error) = match disposition {
            Disposition::Succeeded(result) => {
                metrics.jobs_succeeded.increment();
                (Some(Recorded::Succeeded(result)), None)
            }
            Disposition::Dead(error) => {
                metrics.jobs_failed.increment();
                let dead = Recorded::Dead { error: error.clone(), attempts: job.attempt };
                (Some(dead), Some(error))
            }
            Disposition::RetryAfter { error, .. } => {
                metrics.jobs_retried.increment();
                (None, Some(error))
            }
        };
        self.peers.events.do_send(JobEvent::Ended {
            job: job.spec.id,
            attempt: job.attempt,
            stolen,
            ran,
            origin: job.spec.origin.clone(),
            recorded,
            error,
        });
    }
}

impl Actor for TenantExecutor {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        self.tell_load();
        self.left(0);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        for held in self.jobs.values() {
            if let Stage::Running { handle, .. } = &held.stage {
                handle.abort();
            }
        }
    }
}

impl Handler<Run> for TenantExecutor {
    type Result = ();

    fn handle(&mut self, Run { job, waited, stolen }: Run, ctx: &mut Self::Context) {
        if !self.setup.handlers.contains_key(&job.spec.handler) {
            self.give_back(&job, ctx);
            return;
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let claims = vec![job.claim()];
        let since = self.clock.now();
        let owner = self.setup.identity.owner();
        let generation = owner.generation;
        let stage = Stage::Starting { since };
        let held = Held { job: Arc::new(job), generation, waited, stolen, stage };
        self.jobs.insert(serial, held);
        self.in_hand += 1;
        self.tell_load();
        let start = self.peers.store.start.send(Start { owner, claims });
        let me = ctx.address();
        actix::spawn(async move {
            // A claim whose start failed is still this node's in the store, and is readopted.
            let may_run = match start.await {
                Ok(Ok(may_run)) => may_run.first().copied().unwrap_or(false),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "a job could not be started");
                    false
                }
                Err(_) => false,
            };
            me.do_send(StartAnswered { serial, may_run });
        });
    }
}

impl Handler<StartAnswered> for TenantExecutor {
    type Result = ();

    fn handle(&mut self, answer: StartAnswered, ctx: &mut Self::Context) {
        let Some(held) = self.jobs.get_mut(&answer.serial) else { return };
        if let Stage::Starting { since } = held.stage {
            self.credits.observe_start(self.clock.now().saturating_since(since));
        }
        if answer.may_run {
            held.stage = Stage::Ready;
            self.ready.push_back(answer.serial);
            self.fill_slots(ctx);
        } else {
            self.in_hand -= 1;
            self.tell_load();
            self.forget(answer.serial);
            self.left(1);
        }
    }
}

impl Handler<Returned> for TenantExecutor {
    type Result = ();

    fn handle(&mut self, Returned { serial, end }: Returned, ctx: &mut Self::Context) {
        let Some(held) = self.jobs.get_mut(&serial) else { return };
        let Stage::Running { since, .. } = held.stage else { return };
        let ran = self.clock.now().saturating_since(since);
        self.running -= 1;
        self.in_hand -= 1;
        self.credits.observe_service(ran);
        match end {
            Some(end) => {
                let policy = self
                    .setup
                    .handlers
                    .get(&held.job.spec.handler)
                    .map_or_else(RetryPolicy::default, |runner| runner.retry_policy());
                let disposition = policy.decide(held.job.attempt, held.job.spec.max_attempts, end);
                held.stage = Stage::Recording { disposition, ran };
                self.record(serial, ctx);
            }
            // The lease ran out, and the handler is dropped: unless another node has the job by now,
            // it can be queued again at once.
            None => {
                let error = "the lease ran out".to_owned();
                let disposition = Disposition::RetryAfter { delay: Duration::ZERO, error };
                held.stage = Stage::Recording { disposition, ran };
                self.record(serial, ctx);
            }
        }
        self.left(1);
        self.fill_slots(ctx);
    }
}

impl Handler<Recording> for TenantExecutor {
    type Result = ();

    fn handle(&mut self, Recording { serial, result }: Recording, ctx: &mut Self::Context) {
        match result {
            Ok(true) => self.recorded(serial),
            Ok(false) => tracing::warn!("an attempt's end came too late: the job has a new owner"),
            Err(error) if error.is_retryable() => {
                tracing::warn!(%error, "an attempt's end is not recorded yet");
                ctx.run_later(RECORD_AGAIN, move |executor, ctx| executor.record(serial, ctx));
                return;
            }
            Err(error) => tracing::error!(%error, "an attempt's end cannot be recorded"),
        }
        self.forget(serial);
    }
}

impl Handler<CancelAll> for TenantExecutor {
    type Result = ();

    fn handle(&mut self, _: CancelAll, _: &mut Self::Context) {
        let serials: Vec<u64> = self.jobs.keys().copied().collect();
        let mut freed = 0;
        for serial in serials {
            match &self.jobs[&serial].stage {
                Stage::Recording { .. } => continue,
                Stage::Running { handle, .. } => {
                    handle.abort();
                    self.running -= 1;
                }
                Stage::Starting { .. } | Stage::Ready => {}
            }
            freed += 1;
            self.in_hand -= 1;
            self.forget(serial);
        }
        self.ready.clear();
        self.tell_load();
        self.left(freed);
    }
}

impl Handler<AwaitIdle> for TenantExecutor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: AwaitIdle, _: &mut Self::Context) -> Self::Result {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        if self.jobs.is_empty() {
            // The receiver is right here.
            let _ = sender.send(());
        } else {
            self.idle_waiters.push(sender);
        }
        Box::pin(async move {
            // A dropped sender means that the executor is gone, and so are its jobs.
            let _ = receiver.await;
        })
    }
}

/// A handler that is polled only while the lease holds; `None` when it ran out.
struct Leased {
    identity: Arc<Identity>,
    generation: Generation,
    clock: Clock,
    inner: Pin<Box<dyn Future<Output = AttemptEnd>>>,
}

impl Future for Leased {
    type Output = Option<AttemptEnd>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Cx<'_>) -> Poll<Self::Output> {
        if !self.identity.lease_holds(self.generation, self.clock.now()) {
            return Poll::Ready(None);
        }
        self.inner.as_mut().poll(cx).map(Some)
    }
}
