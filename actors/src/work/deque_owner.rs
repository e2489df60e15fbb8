//! `DequeOwner`: carries the [`Dispatcher`], the rules of the local deque.
//!
//! Owns the deque, offers in transit, credits. Receives [`Enqueue`] and [`EnqueueBatch`] from users,
//! [`PushSorted`], [`RoomBack`], [`LendRoom`] and [`SpillDrained`] from the prefetcher and the
//! stealer, [`LowWater`] from the stealer, [`Credit`] from executors, [`Surrender`] and [`Settle`]
//! from the steal listener, [`ClearDeque`] and [`UnknownClaims`] from the lease keeper,
//! [`MembershipChanged`], [`CloseDeque`] from the node. Sends `Insert`, `Retake` and `Release` to the
//! store, [`Run`] to the executor, [`Idle`] and [`Nudged`] to the prefetcher, hints to peers. On
//! death the node stops.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use arc_swap::ArcSwap;
use futures_util::future::LocalBoxFuture;
use meshwork_protocol::deque::{Dispatcher, Effect, InsertOutcome, Plan, Source};
use meshwork_protocol::hash_ring::HashRing;
use meshwork_protocol::id::{HandlerName, JobId, NodeId, Owner};
use meshwork_protocol::job::{Claim, ClaimedJob, JobSpec};
use meshwork_protocol::load::{Load, LoadReport};
use meshwork_protocol::swim::MembershipEvent;
use meshwork_protocol::wire::datagram::Body;
use meshwork_protocol::wire::stream::Offer;

use crate::clock::{Clock, unix_ms};
use crate::fair::tenant_executor::Run;
use crate::identity::Identity;
use crate::load_cell::LoadCell;
use crate::mesh::gossip_socket::Nudged;
use crate::mesh::hints::Hints;
use crate::metrics::Metrics;
use crate::start::{Alarm, Timed};
use crate::store::messages::{
    Insert, Inserted, NewJob, Release, Retake, StoreError, StoreHandle, StoreResult,
};
use crate::subscribers::{MemberTable, MembershipChanged};
use crate::work::enqueue::{
    Accepted, Enqueue, EnqueueBatch, EnqueueError, INSERTS_MAX, Job, Request, Ticket,
};

/// A peer is nudged once, and again at the earliest after this time if there was cause.
const NUDGE_PAUSE: Duration = Duration::from_millis(2);

/// Jobs that this node holds now.
#[derive(Message)]
#[rtype(result = "()")]
pub struct PushSorted {
    /// The jobs, claimed.
    pub jobs: Vec<ClaimedJob>,
    /// Where they came from.
    pub source: Source,
}

/// Room that was lent comes back unused.
#[derive(Message)]
#[rtype(result = "()")]
pub struct RoomBack(pub usize);

/// Whoever knows where work is asks for room.
#[derive(Message)]
#[rtype(result = "usize")]
pub struct LendRoom;

/// None of this node's jobs waits in the store.
#[derive(Message)]
#[rtype(result = "()")]
pub struct SpillDrained;

/// Look for work already at so many queued jobs.
#[derive(Message)]
#[rtype(result = "()")]
pub struct LowWater(pub usize);

/// An executor can take so many more jobs.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Credit(pub usize);

/// A thief asks for up to `max` jobs; 0 refuses it politely.
#[derive(Message)]
#[rtype(result = "Offer")]
pub struct Surrender {
    /// Who.
    pub thief: Owner,
    /// Its number for the request.
    pub seq: u32,
    /// At most so many.
    pub max: usize,
    /// How busy it is.
    pub load: Load,
}

/// A thief says which jobs of an offer it got.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Settle {
    /// Who.
    pub thief: Owner,
    /// Which offer.
    pub offer: u64,
    /// The jobs it got.
    pub taken: Vec<JobId>,
}

/// The lease is lost: forget every claim.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ClearDeque;

/// Which of these claims does the deque not know?
#[derive(Message)]
#[rtype(result = "Vec<Claim>")]
pub struct UnknownClaims(pub Vec<Claim>);

/// Accept and hand out nothing more; the answer is what is left, to be released.
#[derive(Message)]
#[rtype(result = "Vec<Claim>")]
pub struct CloseDeque;

/// The deque is low, and lends room to whoever finds work.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Idle {
    /// For so many jobs.
    pub room: usize,
}

#[derive(Message)]
#[rtype(result = "Result<Vec<Accepted>, EnqueueError>")]
struct InsertAnswered {
    planned: Vec<(Arc<JobSpec>, Plan)>,
    answer: StoreResult<Vec<Inserted>>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct RetakeAnswered {
    offer: u64,
    answer: StoreResult<Vec<Claim>>,
}

/// Whom the owner tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// `TenantExecutor`.
    pub run: Recipient<Run>,
    /// `Prefetcher`.
    pub idle: Recipient<Idle>,
    /// `Prefetcher`.
    pub nudged: Recipient<Nudged>,
    /// Other nodes.
    pub hints: Hints,
}

/// What the owner is built with.
pub struct Setup {
    /// Who this node is.
    pub identity: Arc<Identity>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
    /// Where it says how much waits.
    pub load: Arc<LoadCell>,
    /// Whose a key is.
    pub ring: Arc<ArcSwap<HashRing>>,
    /// Who else there is.
    pub table: Arc<ArcSwap<MemberTable>>,
    /// Handlers that jobs may name.
    pub known_handlers: KnownHandlers,
}

/// Whether a handler of this name runs here (`Some(true)`), on other nodes (`Some(false)`), or is
/// unknown.
pub type KnownHandlers = Arc<dyn Fn(&HandlerName) -> Option<bool> + Send + Sync>;

/// The actor.
pub struct DequeOwner {
    dispatcher: Dispatcher,
    setup: Setup,
    inserting: usize,
    closed: bool,
    /// Peers nudged a moment ago, and whether there has been cause again.
    nudging: HashMap<NodeId, bool>,
    stolen_out: u64,
    clock: Clock,
    alarm: Alarm,
    peers: Peers,
}

impl DequeOwner {
    /// An actor that carries `dispatcher`.
    pub fn new(dispatcher: Dispatcher, setup: Setup, peers: Peers) -> Self {
        Self {
            dispatcher,
            setup,
            inserting: 0,
            closed: false,
            nudging: HashMap::new(),
            stolen_out: 0,
            clock: Clock,
            alarm: Alarm::default(),
            peers,
        }
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.dispatcher.poll_effect() {
            match effect {
                Effect::Run { entry, waited } => {
                    self.setup.metrics.local_pops.increment();
                    let stolen = entry.stolen;
                    self.peers.run.do_send(Run { job: entry.job, waited, stolen });
                }
                Effect::Idle { room } => self.peers.idle.do_send(Idle { room }),
                Effect::Retake { offer, claims } => {
                    let owner = self.setup.identity.owner();
                    let retake = self.peers.store.retake.send(Retake { owner, claims });
                    let me = ctx.address();
                    actix::spawn(async move {
                        let answer = retake.await.unwrap_or(Err(StoreError::Stopped));
                        me.do_send(RetakeAnswered { offer, answer });
                    });
                }
                Effect::Hint { thief, stealable } => {
                    self.peers.hints.send(&thief, Body::SurplusHint { stealable });
                }
                Effect::Nudge { node } => self.nudge(node, ctx),
                Effect::NudgeSelf => self.peers.nudged.do_send(Nudged),
                Effect::Release { claims } => {
                    let owner = self.setup.identity.owner();
                    self.peers.store.release.do_send(Release { owner, claims, to: None });
                }
            }
        }
        let stolen_out = self.dispatcher.counters().jobs_stolen_out;
        let new = usize::try_from(stolen_out - self.stolen_out).unwrap_or(0);
        self.setup.metrics.jobs_stolen_out.add(new);
        self.stolen_out = stolen_out;
        self.setup.load.set_deque(self.dispatcher.queued(), self.dispatcher.stealable());
        self.alarm.set(ctx, self.clock, self.dispatcher.poll_timeout());
    }

    /// One nudge at once, and one after a pause for all that came in it.
    fn nudge(&mut self, node: NodeId, ctx: &mut Context<Self>) {
        if let Some(again) = self.nudging.get_mut(&node) {
            *again = true;
            return;
        }
        self.peers.hints.send(&node, Body::Nudge);
        self.nudging.insert(node.clone(), false);
        ctx.run_later(NUDGE_PAUSE, move |owner, ctx| {
            if owner.nudging.remove(&node) == Some(true) {
                owner.nudge(node, ctx);
            }
        });
    }

    fn specs(&self, requests: Vec<Request>) -> Result<Vec<Arc<JobSpec>>, EnqueueError> {
        let now_ms = unix_ms();
        let origin = &self.setup.identity.node;
        requests
            .into_iter()
            .map(|request| {
                if (self.setup.known_handlers)(&request.handler).is_none() {
                    return Err(EnqueueError::UnknownHandler(request.handler));
                }
                request.check()?;
                Ok(Arc::new(JobSpec {
                    id: request.id,
                    handler: request.handler,
                    arguments: request.arguments,
                    key: request.key,
                    tenant: request.tenant,
                    priority: request.priority,
                    run_at_ms: request.run_at_ms,
                    max_attempts: request.max_attempts,
                    pinned: request.pinned,
                    origin: origin.clone(),
                    enqueued_ms: now_ms,
                }))
            })
            .collect()
    }

    fn enqueue(
        &mut self,
        requests: Vec<Request>,
        ctx: &mut Context<Self>,
    ) -> LocalBoxFuture<'static, Result<Vec<Accepted>, EnqueueError>> {
        let refuse = |error| -> LocalBoxFuture<'static, _> { Box::pin(async { Err(error) }) };
        if self.closed {
            return refuse(EnqueueError::Stopping);
        }
        if requests.len() > INSERTS_MAX {
            return refuse(EnqueueError::BatchTooLarge(requests.len()));
        }
        if self.inserting + requests.len() > INSERTS_MAX {
            return refuse(EnqueueError::Busy(self.inserting));
        }
        let specs = match self.specs(requests) {
            Ok(specs) => specs,
            Err(error) => return refuse(error),
        };
        let ring = self.setup.ring.load();
        let me = &self.setup.identity.node;
        let place = |spec: &JobSpec| match owner_of(&ring, spec) {
            Some(owner) if owner == me && !self.runs(&spec.handler) => self.someone_else(),
            Some(owner) => owner.clone(),
            None => me.clone(),
        };
        let places: HashMap<JobId, NodeId> =
            specs.iter().map(|spec| (spec.id, place(spec))).collect();
        let plans = self.dispatcher.plan_insert(&specs, |spec| places[&spec.id].clone(), unix_ms());
        let planned: Vec<(Arc<JobSpec>, Plan)> = specs.into_iter().zip(plans).collect();
        self.inserting += planned.len();
        let jobs = planned
            .iter()
            .map(|(spec, plan)| NewJob {
                spec: spec.clone(),
                affinity: plan.affinity.clone(),
                claim: plan.claim,
            })
            .collect();
        let insert =
            self.peers.store.insert.send(Insert { owner: self.setup.identity.owner(), jobs });
        let me = ctx.address();
        Box::pin(async move {
            let answer = insert.await.unwrap_or(Err(StoreError::Stopped));
            let accepted = me.send(InsertAnswered { planned, answer }).await;
            // The store has answered, and nobody here can say what.
            accepted.unwrap_or(Err(EnqueueError::Store(StoreError::Stopped)))
        })
    }

    fn runs(&self, handler: &HandlerName) -> bool {
        (self.setup.known_handlers)(handler) == Some(true)
    }

    /// Any other member, for a job that this node accepts and cannot run.
    fn someone_else(&self) -> NodeId {
        let table = self.setup.table.load();
        let me = &self.setup.identity.node;
        let others: Vec<&NodeId> =
            table.present().map(|member| &member.id).filter(|id| *id != me).collect();
        fastrand::choice(others).unwrap_or(me).clone()
    }
}

/// Whose a job is: its key's owner on the ring, or without a key the node that accepted it.
fn owner_of<'a>(ring: &'a HashRing, spec: &'a JobSpec) -> Option<&'a NodeId> {
    match &spec.key {
        Some(key) => ring.owner_of(key),
        None => Some(&spec.origin),
    }
}

impl Actor for DequeOwner {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.dispatch(ctx);
    }
}

impl Timed for DequeOwner {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        self.dispatcher.handle_timeout(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<EnqueueBatch> for DequeOwner {
    type Result = LocalBoxFuture<'static, Result<Vec<Accepted>, EnqueueError>>;

    fn handle(
        &mut self,
        EnqueueBatch(requests): EnqueueBatch,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        self.enqueue(requests, ctx)
    }
}

impl<J: Job> Handler<Enqueue<J>> for DequeOwner {
    type Result = LocalBoxFuture<'static, Result<Ticket<J>, EnqueueError>>;

    fn handle(&mut self, enqueue: Enqueue<J>, ctx: &mut Self::Context) -> Self::Result {
        let accepted = match enqueue.into_request() {
            Ok(request) => self.enqueue(vec![request], ctx),
            Err(error) => return Box::pin(async { Err(error) }),
        };
        Box::pin(async move {
            let accepted = accepted.await?.first().copied();
            accepted.map(Ticket::accepted).ok_or(EnqueueError::Store(StoreError::Stopped))
        })
    }
}

impl Handler<InsertAnswered> for DequeOwner {
    type Result = Result<Vec<Accepted>, EnqueueError>;

    fn handle(
        &mut self,
        InsertAnswered { planned, answer }: InsertAnswered,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        self.inserting -= planned.len();
        let outcomes: Vec<InsertOutcome> = match &answer {
            Ok(inserted) => inserted.iter().map(outcome).collect(),
            Err(_) => vec![InsertOutcome::Failed; planned.len()],
        };
        let accepted = planned
            .iter()
            .zip(&outcomes)
            .map(|((spec, _), outcome)| Accepted {
                id: spec.id,
                duplicate: *outcome == InsertOutcome::Duplicate,
            })
            .collect();
        let inserted = planned.into_iter().zip(outcomes);
        let inserted = inserted.map(|((spec, plan), outcome)| (spec, plan, outcome)).collect();
        self.dispatcher.handle_inserted(self.clock.now(), inserted);
        self.dispatch(ctx);
        answer.map(|_| accepted).map_err(EnqueueError::Store)
    }
}

fn outcome(inserted: &Inserted) -> InsertOutcome {
    match inserted {
        Inserted::Unclaimed => InsertOutcome::Unclaimed,
        Inserted::Claimed(token) => InsertOutcome::Claimed(*token),
        Inserted::Duplicate => InsertOutcome::Duplicate,
    }
}

impl Handler<PushSorted> for DequeOwner {
    type Result = ();

    fn handle(&mut self, PushSorted { jobs, source }: PushSorted, ctx: &mut Self::Context) {
        let ring = self.setup.ring.load();
        let me = &self.setup.identity.node;
        let sort = |job: ClaimedJob| {
            let owned = owner_of(&ring, &job.spec) == Some(me);
            (job, owned)
        };
        let jobs = jobs.into_iter().map(sort).collect();
        self.dispatcher.push_sorted(self.clock.now(), jobs, source);
        self.dispatch(ctx);
    }
}

impl Handler<RoomBack> for DequeOwner {
    type Result = ();

    fn handle(&mut self, RoomBack(room): RoomBack, ctx: &mut Self::Context) {
        self.dispatcher.handle_room_back(room);
        self.dispatch(ctx);
    }
}

impl Handler<LendRoom> for DequeOwner {
    type Result = usize;

    fn handle(&mut self, _: LendRoom, _: &mut Self::Context) -> usize {
        self.dispatcher.lend()
    }
}

impl Handler<SpillDrained> for DequeOwner {
    type Result = ();

    fn handle(&mut self, _: SpillDrained, _: &mut Self::Context) {
        self.dispatcher.spill_drained();
    }
}

impl Handler<LowWater> for DequeOwner {
    type Result = ();

    fn handle(&mut self, LowWater(jobs): LowWater, ctx: &mut Self::Context) {
        self.dispatcher.set_low_water(jobs);
        self.dispatch(ctx);
    }
}

impl Handler<Credit> for DequeOwner {
    type Result = ();

    fn handle(&mut self, Credit(n): Credit, ctx: &mut Self::Context) {
        self.dispatcher.credit(self.clock.now(), n);
        self.dispatch(ctx);
    }
}

impl Handler<Surrender> for DequeOwner {
    type Result = MessageResult<Surrender>;

    fn handle(&mut self, request: Surrender, ctx: &mut Self::Context) -> Self::Result {
        let Surrender { thief, seq, max, load: theirs } = request;
        let mine = self.setup.load.load();
        let now = self.clock.now();
        let plan = self.dispatcher.surrender_evenly(now, &thief, max, &mine, &theirs);
        self.dispatch(ctx);
        let load = LoadReport {
            node: self.setup.identity.node.clone(),
            generation: self.setup.identity.generation(),
            load: self.setup.load.load(),
            age_ms: 0,
        };
        MessageResult(plan.into_frame(seq, Some(load)))
    }
}

impl Handler<Settle> for DequeOwner {
    type Result = ();

    fn handle(&mut self, Settle { thief, offer, taken }: Settle, ctx: &mut Self::Context) {
        self.dispatcher.settle(self.clock.now(), &thief, offer, &taken);
        self.dispatch(ctx);
    }
}

impl Handler<RetakeAnswered> for DequeOwner {
    type Result = ();

    fn handle(
        &mut self,
        RetakeAnswered { offer, answer }: RetakeAnswered,
        ctx: &mut Self::Context,
    ) {
        if let Err(error) = &answer {
            tracing::warn!(%error, "an expired offer could not be retaken");
        }
        self.dispatcher.handle_retaken(self.clock.now(), offer, answer.ok().as_deref());
        self.dispatch(ctx);
    }
}

impl Handler<MembershipChanged> for DequeOwner {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, _: &mut Self::Context) {
        if let MembershipEvent::Died { member, .. } | MembershipEvent::Left { member, .. } = event {
            self.dispatcher.forget(&member.id);
        }
    }
}

impl Handler<ClearDeque> for DequeOwner {
    type Result = ();

    fn handle(&mut self, _: ClearDeque, ctx: &mut Self::Context) {
        let forgotten = self.dispatcher.clear();
        tracing::warn!(forgotten, "the lease is lost: claims are forgotten");
        self.dispatch(ctx);
    }
}

impl Handler<UnknownClaims> for DequeOwner {
    type Result = MessageResult<UnknownClaims>;

    fn handle(
        &mut self,
        UnknownClaims(mut claims): UnknownClaims,
        _: &mut Self::Context,
    ) -> Self::Result {
        claims.retain(|claim| !self.dispatcher.knows(&claim.job));
        MessageResult(claims)
    }
}

impl Handler<CloseDeque> for DequeOwner {
    type Result = MessageResult<CloseDeque>;

    fn handle(&mut self, _: CloseDeque, ctx: &mut Self::Context) -> Self::Result {
        self.closed = true;
        let left = self.dispatcher.close();
        self.dispatch(ctx);
        MessageResult(left)
    }
}
