//! `SwimProber`: carries the [`Detector`].
//!
//! Owns the probe cycle, suspicion timers and the dissemination queue. Receives [`Received`] from
//! the socket, [`SpreadChanged`] and [`SayGoodbye`] from the membership store, its own timer. Sends
//! [`Transmit`] and [`Dial`] to the socket, [`MembersHeard`] and [`MemberVerdict`] to the membership
//! store. On death the node stops.

use std::sync::Arc;

use actix::prelude::*;
use futures_util::future::LocalBoxFuture;
use meshwork_protocol::swim::detector::{Detector, Effect};
use meshwork_protocol::swim::members::Target;
use meshwork_protocol::swim::{Ask, Changed};
use meshwork_protocol::wire::datagram::Sender;

use crate::clock::Clock;
use crate::load_cell::LoadCell;
use crate::mesh::gossip_socket::{Dial, Received, Transmit};
use crate::mesh::membership_store::{MemberVerdict, MembersHeard};
use crate::start::{Alarm, Timed};

/// The member table changed: spread it, and probe accordingly.
#[derive(Message)]
#[rtype(result = "()")]
pub struct SpreadChanged(pub Changed);

/// Say goodbye to some members; answered when the datagrams are sent.
#[derive(Message)]
#[rtype(result = "()")]
pub struct SayGoodbye;

#[derive(Message)]
#[rtype(result = "()")]
struct StreamPinged {
    id: u64,
    result: Result<Sender, ()>,
}

/// Whom the prober tells.
pub struct Peers {
    /// `GossipSocket`, or what stands between.
    pub transmit: Recipient<Transmit>,
    /// `GossipSocket`.
    pub dial: Recipient<Dial>,
    /// `MembershipStore`.
    pub heard: Recipient<MembersHeard>,
    /// `MembershipStore`.
    pub verdict: Recipient<MemberVerdict>,
}

/// The actor.
pub struct SwimProber {
    detector: Detector,
    load: Arc<LoadCell>,
    clock: Clock,
    alarm: Alarm,
    peers: Peers,
}

impl SwimProber {
    /// An actor that carries `detector`.
    pub fn new(detector: Detector, load: Arc<LoadCell>, peers: Peers) -> Self {
        Self { detector, load, clock: Clock, alarm: Alarm::default(), peers }
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.detector.poll_effect() {
            self.carry(effect, ctx);
        }
        self.alarm.set(ctx, self.clock, self.detector.poll_timeout());
    }

    fn carry(&self, effect: Effect, ctx: &Context<Self>) {
        match effect {
            Effect::Transmit { to, message } => {
                self.peers.transmit.do_send(Transmit { to, message });
            }
            Effect::Heard(heard) => self.peers.heard.do_send(MembersHeard(heard)),
            Effect::Verdict(verdict) => self.peers.verdict.do_send(MemberVerdict(verdict)),
            Effect::StreamPing { id, to, target: _ } => {
                let dial = self.peers.dial.send(Dial { to: Target::Addr(to), ask: Ask::Ping });
                let me = ctx.address();
                actix::spawn(async move {
                    let result = match dial.await {
                        Ok(Ok((from, _pong))) => Ok(from),
                        _ => Err(()),
                    };
                    me.do_send(StreamPinged { id, result });
                });
            }
        }
    }
}

impl Actor for SwimProber {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.detector.start(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Timed for SwimProber {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        self.detector.set_load(self.load.load());
        self.detector.handle_timeout(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<Received> for SwimProber {
    type Result = ();

    fn handle(&mut self, Received { from, datagram }: Received, ctx: &mut Self::Context) {
        self.detector.set_load(self.load.load());
        self.detector.handle_datagram(self.clock.now(), from, datagram);
        self.dispatch(ctx);
    }
}

impl Handler<SpreadChanged> for SwimProber {
    type Result = ();

    fn handle(&mut self, SpreadChanged(changed): SpreadChanged, ctx: &mut Self::Context) {
        self.detector.handle_changed(self.clock.now(), changed);
        self.dispatch(ctx);
    }
}

impl Handler<StreamPinged> for SwimProber {
    type Result = ();

    fn handle(&mut self, StreamPinged { id, result }: StreamPinged, ctx: &mut Self::Context) {
        self.detector.handle_stream_ping(self.clock.now(), id, result);
        self.dispatch(ctx);
    }
}

impl Handler<SayGoodbye> for SwimProber {
    type Result = LocalBoxFuture<'static, ()>;

    fn handle(&mut self, _: SayGoodbye, ctx: &mut Self::Context) -> Self::Result {
        self.detector.handle_leave(self.clock.now());
        let mut goodbyes = Vec::new();
        while let Some(effect) = self.detector.poll_effect() {
            match effect {
                Effect::Transmit { to, message } => {
                    goodbyes.push(self.peers.transmit.send(Transmit { to, message }));
                }
                effect => self.carry(effect, ctx),
            }
        }
        self.alarm.set(ctx, self.clock, self.detector.poll_timeout());
        Box::pin(async move {
            // Whatever could not be sent is what a probe finds out later.
            futures_util::future::join_all(goodbyes).await;
        })
    }
}
