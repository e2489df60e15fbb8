//! `MembershipStore`: carries [`Members`].
//!
//! Owns the member table, precedence, this node's incarnation, tombstones, joins and state exchange.
//! Receives [`MembersHeard`] and [`MemberVerdict`] from the prober, [`Asked`] from the socket,
//! [`Subscribe`], [`JoinSeeds`], [`Leave`] and [`GenerationChanged`] from the node. Sends
//! [`SpreadChanged`] to the prober, [`Dial`] to the socket, [`MembershipChanged`] and [`LoadChanged`]
//! to those who follow, and publishes an `Arc` snapshot that anyone may read. On death the node
//! stops.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use actix::prelude::*;
use arc_swap::ArcSwap;
use futures_util::future::LocalBoxFuture;
use meshwork_protocol::id::Generation;
use meshwork_protocol::load::LoadReport;
use meshwork_protocol::swim::members::{DialError, Effect, Members};
use meshwork_protocol::swim::{Answer, Heard, Verdict};
use meshwork_protocol::wire::datagram::Sender;
use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::mesh::gossip_socket::{Asked, Dial};
use crate::mesh::swim_prober::{SayGoodbye, SpreadChanged};
use crate::start::{Alarm, Timed};
use crate::subscribers::{MemberTable, MembershipChanged, RETRY, Sink, Subscribers};

/// Datagrams said this of members.
#[derive(Message)]
#[rtype(result = "()")]
pub struct MembersHeard(pub Heard);

/// A probe, or the end of a suspicion, says this of a member.
#[derive(Message)]
#[rtype(result = "()")]
pub struct MemberVerdict(pub Verdict);

/// Follow the membership: a snapshot first, then events in order.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Subscribe(pub Sink);

impl Subscribe {
    /// Events go to `recipient`, whose mailbox bounds what may wait for it.
    pub fn new(recipient: Recipient<MembershipChanged>) -> Self {
        Self(Sink::Actor(recipient))
    }
}

/// Try these seeds too.
#[derive(Message)]
#[rtype(result = "()")]
pub struct JoinSeeds(pub Vec<String>);

/// Leave the mesh: the own record becomes Left, and some members are told. Answered when they were.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Leave;

/// The store has given this node a new generation.
#[derive(Message)]
#[rtype(result = "()")]
pub struct GenerationChanged(pub Generation);

/// A node's load is news.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct LoadChanged(pub LoadReport);

/// What only the node as a whole can act on.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub enum NodeNotice {
    /// The mesh remembers a newer generation of this id: register above it.
    GenerationTooLow {
        /// The lowest that will do.
        at_least: Generation,
    },
    /// A newer boot of this id is alive: this one must stop.
    Fenced {
        /// The newer one.
        by: Generation,
    },
    /// A live node has this id: this one is not admitted.
    Refused {
        /// Where the other answers.
        holder: SocketAddr,
    },
    /// A seed does not answer; it is tried again.
    SeedUnreachable {
        /// Which.
        seed: String,
        /// Why.
        reason: String,
    },
    /// A seed answered.
    Joined,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Dialled {
    id: u64,
    result: Result<(Sender, Answer), DialError>,
}

/// Whom the store tells.
pub struct Peers {
    /// `SwimProber`.
    pub spread: Recipient<SpreadChanged>,
    /// `SwimProber`.
    pub goodbye: Recipient<SayGoodbye>,
    /// `GossipSocket`.
    pub dial: Recipient<Dial>,
    /// `RingKeeper`, `Stealer`, `Prefetcher`, `LeaseKeeper`, `DequeOwner`.
    pub followers: Vec<Recipient<MembershipChanged>>,
    /// `Stealer`.
    pub loads: Vec<Recipient<LoadChanged>>,
    /// The node.
    pub notices: Recipient<NodeNotice>,
}

/// The actor.
pub struct MembershipStore {
    members: Members,
    table: Arc<ArcSwap<MemberTable>>,
    subscribers: Subscribers,
    asked: HashMap<u64, oneshot::Sender<Answer>>,
    next_ask: u64,
    clock: Clock,
    alarm: Alarm,
    retrying: bool,
    peers: Peers,
}

impl MembershipStore {
    /// An actor that carries `members` and publishes its table in `table`.
    pub fn new(members: Members, table: Arc<ArcSwap<MemberTable>>, peers: Peers) -> Self {
        Self {
            members,
            table,
            subscribers: Subscribers::default(),
            asked: HashMap::new(),
            next_ask: 0,
            clock: Clock,
            alarm: Alarm::default(),
            retrying: false,
            peers,
        }
    }

    fn publish_table(&self) {
        let epoch = self.members.snapshot().epoch();
        let members: Arc<[_]> = self.members.table().cloned().collect();
        self.table.store(Arc::new(MemberTable { epoch, members }));
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.members.poll_effect() {
            match effect {
                Effect::Changed(changed) => {
                    self.publish_table();
                    self.peers.spread.do_send(SpreadChanged(changed));
                }
                Effect::Event(event) => {
                    self.publish_table();
                    for follower in &self.peers.followers {
                        follower.do_send(MembershipChanged(event.clone()));
                    }
                    self.subscribers.publish(&event, || self.members.snapshot());
                }
                Effect::Load(report) => {
                    for recipient in &self.peers.loads {
                        recipient.do_send(LoadChanged(report.clone()));
                    }
                }
                Effect::Dial { id, to, ask } => {
                    let dial = self.peers.dial.send(Dial { to, ask });
                    let me = ctx.address();
                    actix::spawn(async move {
                        let result = match dial.await {
                            Ok(Ok(answer)) => Ok(answer),
                            Ok(Err(error)) => Err(error),
                            Err(_) => Err(DialError::Closed),
                        };
                        me.do_send(Dialled { id, result });
                    });
                }
                Effect::Answer { id, answer } => {
                    if let Some(asker) = self.asked.remove(&id) {
                        // The asker may have hung up.
                        let _ = asker.send(answer);
                    }
                }
                Effect::GenerationTooLow { at_least } => {
                    self.peers.notices.do_send(NodeNotice::GenerationTooLow { at_least });
                }
                Effect::Fenced { by } => self.peers.notices.do_send(NodeNotice::Fenced { by }),
                Effect::Refused { holder } => {
                    self.peers.notices.do_send(NodeNotice::Refused { holder });
                }
                Effect::Decline { id } => {
                    self.asked.remove(&id);
                }
                Effect::SeedUnreachable { seed, error } => {
                    let reason = error.to_string();
                    self.peers.notices.do_send(NodeNotice::SeedUnreachable { seed, reason });
                }
                Effect::Joined => self.peers.notices.do_send(NodeNotice::Joined),
            }
        }
        self.alarm.set(ctx, self.clock, self.members.poll_timeout());
        self.retry_later(ctx);
    }

    fn retry_later(&mut self, ctx: &mut Context<Self>) {
        if self.subscribers.any_behind() && !self.retrying {
            self.retrying = true;
            ctx.run_later(RETRY, |store, ctx| {
                store.retrying = false;
                store.subscribers.retry(|| store.members.snapshot());
                store.retry_later(ctx);
            });
        }
    }
}

impl Actor for MembershipStore {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.publish_table();
        for follower in &self.peers.followers {
            follower.do_send(MembershipChanged(self.members.snapshot()));
        }
        self.members.start(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Timed for MembershipStore {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        self.members.handle_timeout(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<MembersHeard> for MembershipStore {
    type Result = ();

    fn handle(&mut self, MembersHeard(heard): MembersHeard, ctx: &mut Self::Context) {
        self.members.handle_heard(self.clock.now(), heard);
        self.dispatch(ctx);
    }
}

impl Handler<MemberVerdict> for MembershipStore {
    type Result = ();

    fn handle(&mut self, MemberVerdict(verdict): MemberVerdict, ctx: &mut Self::Context) {
        self.members.handle_verdict(self.clock.now(), &verdict);
        self.dispatch(ctx);
    }
}

impl Handler<Asked> for MembershipStore {
    type Result = LocalBoxFuture<'static, Option<Answer>>;

    fn handle(&mut self, Asked { from, ask }: Asked, ctx: &mut Self::Context) -> Self::Result {
        let id = self.next_ask;
        self.next_ask += 1;
        let (sender, receiver) = oneshot::channel();
        self.asked.retain(|_, asker| !asker.is_closed());
        self.asked.insert(id, sender);
        self.members.handle_ask(self.clock.now(), id, &from, ask);
        self.dispatch(ctx);
        Box::pin(async move { receiver.await.ok() })
    }
}

impl Handler<Dialled> for MembershipStore {
    type Result = ();

    fn handle(&mut self, Dialled { id, result }: Dialled, ctx: &mut Self::Context) {
        self.members.handle_answer(self.clock.now(), id, result);
        self.dispatch(ctx);
    }
}

impl Handler<Subscribe> for MembershipStore {
    type Result = ();

    fn handle(&mut self, Subscribe(sink): Subscribe, ctx: &mut Self::Context) {
        self.subscribers.add(sink, self.members.snapshot());
        self.retry_later(ctx);
    }
}

impl Handler<JoinSeeds> for MembershipStore {
    type Result = ();

    fn handle(&mut self, JoinSeeds(seeds): JoinSeeds, ctx: &mut Self::Context) {
        self.members.add_seeds(self.clock.now(), seeds);
        self.dispatch(ctx);
    }
}

impl Handler<Leave> for MembershipStore {
    type Result = LocalBoxFuture<'static, ()>;

    fn handle(&mut self, _: Leave, ctx: &mut Self::Context) -> Self::Result {
        self.members.leave(self.clock.now());
        self.dispatch(ctx);
        let goodbye = self.peers.goodbye.send(SayGoodbye);
        Box::pin(async move {
            // A prober that is gone says nothing more; the others find out by probing.
            let _ = goodbye.await;
        })
    }
}

impl Handler<GenerationChanged> for MembershipStore {
    type Result = ();

    fn handle(
        &mut self,
        GenerationChanged(generation): GenerationChanged,
        ctx: &mut Self::Context,
    ) {
        self.members.set_generation(self.clock.now(), generation);
        self.dispatch(ctx);
    }
}
