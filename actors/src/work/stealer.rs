//! `Stealer`: carries the [`Thief`].
//!
//! Owns the choice of victims and one connection to each victim in use. Receives [`Hungry`] from the
//! prefetcher, [`LoadChanged`] and [`MembershipChanged`] from the membership store, [`SurplusHinted`]
//! from the socket, [`CloseStealer`] and [`ForgetSteals`]. Sends requests and settlements to victims,
//! `Transfer` and `ClaimsOf` to the store, [`PushSorted`], [`RoomBack`], [`LendRoom`] and
//! [`LowWater`] to the deque's owner, [`JobEvent`] to the result collector. On death the node stops.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use meshwork_protocol::deque::Source;
use meshwork_protocol::id::{JobId, NodeId, Owner};
use meshwork_protocol::job::Claim;
use meshwork_protocol::steal::{AskError, Effect, Moved, Thief, TransferError};
use meshwork_protocol::swim::{Member, MembershipEvent};
use meshwork_protocol::wire::stream::{Hello, Offer, StealFrame};
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::identity::Identity;
use crate::load_cell::LoadCell;
use crate::mesh::gossip_socket::SurplusHinted;
use crate::mesh::links::{Dialler, LinkError, Stream, connect, expect_frame, write_frame};
use crate::mesh::membership_store::LoadChanged;
use crate::metrics::Metrics;
use crate::start::{Alarm, Timed};
use crate::store::messages::{
    ClaimsOf, StoreError, StoreHandle, StoreResult, Transfer, Transferred,
};
use crate::subscribers::MembershipChanged;
use crate::work::deque_owner::{LendRoom, LowWater, PushSorted, RoomBack};
use crate::work::job_events::JobEvent;

/// A connection that nobody uses is closed after this time.
const CONNECTION_IDLE: Duration = Duration::from_secs(30);

/// Requests and settlements that may wait for one connection.
const CONNECTION_QUEUE: usize = 64;

/// The store has nothing more for this room: find work elsewhere.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Hungry {
    /// For so many jobs.
    pub room: usize,
}

/// Ask nobody any more.
#[derive(Message)]
#[rtype(result = "()")]
pub struct CloseStealer;

/// The lease is lost: what is under way is not to be had.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ForgetSteals;

#[derive(Message)]
#[rtype(result = "()")]
struct OfferArrived {
    victim: NodeId,
    seq: u32,
    answer: Result<Offer, AskError>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct TransferAnswered {
    victim: Owner,
    offer: u64,
    answer: StoreResult<Vec<Transferred>>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct HeldAnswered {
    victim: Owner,
    offer: u64,
    answer: StoreResult<Vec<Claim>>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct RoomLent(usize);

/// Whom the stealer tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// `DequeOwner`.
    pub push: Recipient<PushSorted>,
    /// `DequeOwner`.
    pub room_back: Recipient<RoomBack>,
    /// `DequeOwner`.
    pub lend: Recipient<LendRoom>,
    /// `DequeOwner`.
    pub low_water: Recipient<LowWater>,
    /// `ResultCollector`.
    pub events: Recipient<JobEvent>,
}

/// What the stealer is built with.
pub struct Setup {
    /// Who this node is.
    pub identity: Arc<Identity>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
    /// Its load.
    pub load: Arc<LoadCell>,
    /// How connections are opened.
    pub dialler: Arc<dyn Dialler>,
}

/// The actor.
pub struct Stealer {
    thief: Thief,
    setup: Setup,
    connections: HashMap<NodeId, Connection>,
    counted: (u64, u64, u64),
    clock: Clock,
    alarm: Alarm,
    peers: Peers,
}

struct Connection {
    member: Member,
    commands: mpsc::Sender<Command>,
}

enum Command {
    Ask { seq: u32, max: u32 },
    Settle { offer: u64, taken: Vec<JobId> },
}

impl Stealer {
    /// An actor that carries `thief`.
    pub fn new(thief: Thief, setup: Setup, peers: Peers) -> Self {
        Self {
            thief,
            setup,
            connections: HashMap::new(),
            counted: (0, 0, 0),
            clock: Clock,
            alarm: Alarm::default(),
            peers,
        }
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.thief.poll_effect() {
            match effect {
                Effect::Ask { victim, seq, max } => {
                    let asked = self.connection(&victim, ctx).try_send(Command::Ask { seq, max });
                    if asked.is_err() {
                        let answer = Err(AskError::Broken);
                        ctx.notify(OfferArrived { victim: victim.id, seq, answer });
                    }
                }
                Effect::Transfer { victim, offer, claims, fetch } => {
                    let to = self.setup.identity.owner();
                    let transfer = Transfer { from: victim.clone(), to, claims, fetch };
                    let transfer = self.peers.store.transfer.send(transfer);
                    let me = ctx.address();
                    actix::spawn(async move {
                        let answer = transfer.await.unwrap_or(Err(StoreError::Stopped));
                        me.do_send(TransferAnswered { victim, offer, answer });
                    });
                }
                Effect::ReadBack { victim, offer, claims: _ } => {
                    let owner = self.setup.identity.owner();
                    let held = self.peers.store.claims_of.send(ClaimsOf { owner });
                    let me = ctx.address();
                    actix::spawn(async move {
                        let answer = held.await.unwrap_or(Err(StoreError::Stopped));
                        me.do_send(HeldAnswered { victim, offer, answer });
                    });
                }
                Effect::Settle { victim, offer, taken } => {
                    // A settlement that is lost costs the victim a retake.
                    if let Some(connection) = self.connections.get(&victim) {
                        let _ = connection.commands.try_send(Command::Settle { offer, taken });
                    }
                }
                Effect::Push { jobs, from } => {
                    let stolen = JobEvent::StolenIn { from, jobs: jobs.len() };
                    self.peers.push.do_send(PushSorted { jobs, source: Source::Stolen });
                    self.peers.events.do_send(stolen);
                }
                Effect::RoomBack { room } => self.peers.room_back.do_send(RoomBack(room)),
                Effect::WantRoom => {
                    let lend = self.peers.lend.send(LendRoom);
                    let me = ctx.address();
                    actix::spawn(async move {
                        me.do_send(RoomLent(lend.await.unwrap_or(0)));
                    });
                }
                Effect::LowWater { jobs } => self.peers.low_water.do_send(LowWater(jobs)),
            }
        }
        self.count();
        self.alarm.set(ctx, self.clock, self.thief.poll_timeout());
    }

    fn count(&mut self) {
        let now = self.thief.counters();
        let metrics = &self.setup.metrics;
        let new = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(0);
        metrics.steals_initiated.add(new(now.steals_initiated, self.counted.0));
        metrics.steals_succeeded.add(new(now.steals_succeeded, self.counted.1));
        metrics.jobs_stolen_in.add(new(now.jobs_stolen_in, self.counted.2));
        self.counted = (now.steals_initiated, now.steals_succeeded, now.jobs_stolen_in);
    }

    /// The connection to `victim`, made anew when there is none, or it is to another boot.
    fn connection(&mut self, victim: &Member, ctx: &Context<Self>) -> &mpsc::Sender<Command> {
        let stale = self.connections.get(&victim.id).is_none_or(|connection| {
            connection.commands.is_closed()
                || connection.member.generation != victim.generation
                || connection.member.steal != victim.steal
        });
        if stale {
            let (commands, queue) = mpsc::channel(CONNECTION_QUEUE);
            let session = Session {
                identity: self.setup.identity.clone(),
                load: self.setup.load.clone(),
                dialler: self.setup.dialler.clone(),
                victim: victim.clone(),
                stealer: ctx.address().recipient(),
            };
            actix::spawn(session.run(queue));
            let connection = Connection { member: victim.clone(), commands };
            self.connections.insert(victim.id.clone(), connection);
        }
        &self.connections[&victim.id].commands
    }
}

/// One connection to a victim: requests are answered in order, settlements are not answered.
struct Session {
    identity: Arc<Identity>,
    load: Arc<LoadCell>,
    dialler: Arc<dyn Dialler>,
    victim: Member,
    stealer: Recipient<OfferArrived>,
}

impl Session {
    async fn run(self, mut queue: mpsc::Receiver<Command>) {
        let mut stream: Option<Box<dyn Stream>> = None;
        while let Ok(Some(command)) = tokio::time::timeout(CONNECTION_IDLE, queue.recv()).await {
            match command {
                Command::Ask { seq, max } => {
                    let asked = self.ask(&mut stream, seq, max).await;
                    if let Err(error) = &asked {
                        tracing::debug!(victim = %self.victim.id, %error, "a steal request failed");
                        stream = None;
                    }
                    let answer = asked.map_err(|error| match error {
                        LinkError::ConnectTimeout | LinkError::Io(_) => AskError::Unreachable,
                        LinkError::ResponseTimeout | LinkError::WriteTimeout => AskError::TimedOut,
                        _ => AskError::Broken,
                    });
                    let victim = self.victim.id.clone();
                    self.stealer.do_send(OfferArrived { victim, seq, answer });
                }
                Command::Settle { offer, taken } => {
                    if self.settle(&mut stream, offer, taken).await.is_err() {
                        stream = None;
                    }
                }
            }
        }
    }

    async fn open<'a>(
        &self,
        stream: &'a mut Option<Box<dyn Stream>>,
    ) -> Result<&'a mut Box<dyn Stream>, LinkError> {
        if stream.is_none() {
            let mut opened = connect(self.dialler.as_ref(), self.victim.steal).await?;
            let hello = Hello::new(self.identity.mesh, self.identity.sender());
            write_frame(&mut opened, &hello).await?;
            *stream = Some(opened);
        }
        Ok(stream.as_mut().expect("it was opened"))
    }

    async fn ask(
        &self,
        stream: &mut Option<Box<dyn Stream>>,
        seq: u32,
        max: u32,
    ) -> Result<Offer, LinkError> {
        let stream = self.open(stream).await?;
        let load = self.load.load();
        write_frame(stream, &StealFrame::Request { seq, max, load }).await?;
        loop {
            match expect_frame(stream).await? {
                // The answer to an earlier request, which was given up.
                StealFrame::Offer(offer) if offer.seq != seq => {}
                StealFrame::Offer(offer) => return Ok(offer),
                _ => {
                    let error =
                        meshwork_protocol::wire::stream::StreamError::Unexpected("no offer");
                    return Err(error.into());
                }
            }
        }
    }

    async fn settle(
        &self,
        stream: &mut Option<Box<dyn Stream>>,
        offer: u64,
        taken: Vec<JobId>,
    ) -> Result<(), LinkError> {
        let stream = self.open(stream).await?;
        write_frame(stream, &StealFrame::Settle { offer, taken }).await
    }
}

impl Actor for Stealer {
    type Context = Context<Self>;
}

impl Timed for Stealer {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        self.thief.handle_timeout(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<Hungry> for Stealer {
    type Result = ();

    fn handle(&mut self, Hungry { room }: Hungry, ctx: &mut Self::Context) {
        self.thief.handle_idle(self.clock.now(), room, self.setup.load.load());
        self.dispatch(ctx);
    }
}

impl Handler<RoomLent> for Stealer {
    type Result = ();

    fn handle(&mut self, RoomLent(room): RoomLent, ctx: &mut Self::Context) {
        self.thief.handle_idle(self.clock.now(), room, self.setup.load.load());
        self.dispatch(ctx);
    }
}

impl Handler<LoadChanged> for Stealer {
    type Result = ();

    fn handle(&mut self, LoadChanged(report): LoadChanged, ctx: &mut Self::Context) {
        self.thief.handle_load(self.clock.now(), &report);
        self.dispatch(ctx);
    }
}

impl Handler<MembershipChanged> for Stealer {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, ctx: &mut Self::Context) {
        if let MembershipEvent::Died { member, .. } | MembershipEvent::Left { member, .. } = &event
        {
            self.connections.remove(&member.id);
        }
        self.thief.handle_membership(self.clock.now(), &event);
        self.dispatch(ctx);
    }
}

impl Handler<SurplusHinted> for Stealer {
    type Result = ();

    fn handle(&mut self, hint: SurplusHinted, ctx: &mut Self::Context) {
        self.thief.handle_hint(self.clock.now(), &hint.from, hint.stealable);
        self.dispatch(ctx);
    }
}

impl Handler<OfferArrived> for Stealer {
    type Result = ();

    fn handle(&mut self, arrived: OfferArrived, ctx: &mut Self::Context) {
        let OfferArrived { victim, seq, answer } = arrived;
        self.thief.handle_offer(self.clock.now(), &victim, seq, answer);
        self.dispatch(ctx);
    }
}

/// What a store's failure says of what was asked of it: only a lost answer leaves it open.
fn transfer_error(error: &StoreError) -> TransferError {
    match error {
        StoreError::Stopped => TransferError::Unknown,
        _ => TransferError::Undone,
    }
}

impl Handler<TransferAnswered> for Stealer {
    type Result = ();

    fn handle(&mut self, answered: TransferAnswered, ctx: &mut Self::Context) {
        let TransferAnswered { victim, offer, answer } = answered;
        let moved = answer
            .map(|moved| moved.into_iter().map(|t| Moved { claim: t.claim, job: t.job }).collect())
            .map_err(|error| {
                tracing::warn!(%error, %victim, "offered jobs could not be transferred");
                transfer_error(&error)
            });
        self.thief.handle_transferred(self.clock.now(), &victim, offer, moved);
        self.dispatch(ctx);
    }
}

impl Handler<HeldAnswered> for Stealer {
    type Result = ();

    fn handle(&mut self, answered: HeldAnswered, ctx: &mut Self::Context) {
        let HeldAnswered { victim, offer, answer } = answered;
        let held = answer.map_err(|error| transfer_error(&error));
        self.thief.handle_read_back(self.clock.now(), &victim, offer, held);
        self.dispatch(ctx);
    }
}

impl Handler<CloseStealer> for Stealer {
    type Result = ();

    fn handle(&mut self, _: CloseStealer, ctx: &mut Self::Context) {
        self.thief.close();
        self.dispatch(ctx);
    }
}

impl Handler<ForgetSteals> for Stealer {
    type Result = ();

    fn handle(&mut self, _: ForgetSteals, ctx: &mut Self::Context) {
        self.thief.clear();
        self.connections.clear();
        self.dispatch(ctx);
    }
}
