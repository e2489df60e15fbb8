//! `Prefetcher`: carries the protocol's [`Prefetcher`](prefetch::Prefetcher).
//!
//! Owns the schedule by which the store is asked for due jobs. Receives [`Idle`] from the deque's
//! owner, [`Nudged`] from the deque's owner and the socket, [`MembershipChanged`], its own timer.
//! Sends `ClaimDue` and `NextDue` to the store, [`PushSorted`], [`LendRoom`], [`RoomBack`] and
//! [`SpillDrained`] to the deque's owner, [`Hungry`] with what the claim left of the room to the
//! stealer. On death the node stops.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use meshwork_protocol::deque::Source;
use meshwork_protocol::id::{NodeId, Owner};
use meshwork_protocol::job::ClaimedJob;
use meshwork_protocol::prefetch::{self, ClaimFailed, Effect};
use meshwork_protocol::swim::MembershipEvent;

use crate::clock::Clock;
use crate::identity::Identity;
use crate::mesh::gossip_socket::Nudged;
use crate::metrics::Metrics;
use crate::start::{Alarm, Timed};
use crate::store::messages::{ClaimDue, NextDue, Release, StoreError, StoreHandle, StoreResult};
use crate::subscribers::MembershipChanged;
use crate::work::deque_owner::{Idle, LendRoom, PushSorted, RoomBack, SpillDrained};
use crate::work::stealer::Hungry;

#[derive(Message)]
#[rtype(result = "()")]
enum Answered {
    Claimed { owner: Owner, answer: StoreResult<Vec<ClaimedJob>> },
    NextDue(StoreResult<Option<Duration>>),
    Lent(usize),
}

/// Whom the prefetcher tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// `DequeOwner`.
    pub push: Recipient<PushSorted>,
    /// `DequeOwner`.
    pub lend: Recipient<LendRoom>,
    /// `DequeOwner`.
    pub room_back: Recipient<RoomBack>,
    /// `DequeOwner`.
    pub drained: Recipient<SpillDrained>,
    /// `Stealer`, on a node that steals.
    pub hungry: Option<Recipient<Hungry>>,
}

/// What the prefetcher is built with.
pub struct Setup {
    /// Who this node is.
    pub identity: Arc<Identity>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
}

/// The actor.
pub struct Prefetcher {
    machine: prefetch::Prefetcher,
    setup: Setup,
    present: BTreeSet<NodeId>,
    clock: Clock,
    alarm: Alarm,
    peers: Peers,
}

impl Prefetcher {
    /// An actor that carries `machine`.
    pub fn new(machine: prefetch::Prefetcher, setup: Setup, peers: Peers) -> Self {
        let present = BTreeSet::new();
        Self { machine, setup, present, clock: Clock, alarm: Alarm::default(), peers }
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.machine.poll_effect() {
            let me = ctx.address();
            match effect {
                Effect::Claim { max } => {
                    let owner = self.setup.identity.owner();
                    let claim = ClaimDue { owner: owner.clone(), max, own_only: false };
                    let claim = self.peers.store.claim.send(claim);
                    actix::spawn(async move {
                        let answer = claim.await.unwrap_or(Err(StoreError::Stopped));
                        me.do_send(Answered::Claimed { owner, answer });
                    });
                }
                Effect::WantRoom => {
                    let lend = self.peers.lend.send(LendRoom);
                    actix::spawn(async move {
                        me.do_send(Answered::Lent(lend.await.unwrap_or(0)));
                    });
                }
                Effect::Rest { room } => match &self.peers.hungry {
                    Some(hungry) => hungry.do_send(Hungry { room }),
                    None => self.peers.room_back.do_send(RoomBack(room)),
                },
                Effect::Drained => {
                    self.peers.drained.do_send(SpillDrained);
                    let next_due = self.peers.store.next_due.send(NextDue);
                    actix::spawn(async move {
                        let answer = next_due.await.unwrap_or(Err(StoreError::Stopped));
                        me.do_send(Answered::NextDue(answer));
                    });
                }
            }
        }
        self.alarm.set(ctx, self.clock, self.machine.poll_timeout());
    }
}

impl Actor for Prefetcher {
    type Context = Context<Self>;
}

impl Timed for Prefetcher {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        self.machine.handle_timeout(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<Idle> for Prefetcher {
    type Result = ();

    fn handle(&mut self, Idle { room }: Idle, ctx: &mut Self::Context) {
        self.machine.handle_idle(self.clock.now(), room);
        self.dispatch(ctx);
    }
}

impl Handler<Nudged> for Prefetcher {
    type Result = ();

    fn handle(&mut self, _: Nudged, ctx: &mut Self::Context) {
        self.machine.handle_nudge(self.clock.now());
        self.dispatch(ctx);
    }
}

impl Handler<MembershipChanged> for Prefetcher {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, ctx: &mut Self::Context) {
        match &event {
            MembershipEvent::Snapshot { members, .. } => {
                self.present = members.iter().map(|m| m.id.clone()).collect();
            }
            event => {
                if let Some(member) = event.member() {
                    if member.is_present() {
                        self.present.insert(member.id.clone());
                    } else {
                        self.present.remove(&member.id);
                    }
                }
            }
        }
        self.machine.handle_peers(self.present.len().saturating_sub(1));
        self.dispatch(ctx);
    }
}

impl Handler<Answered> for Prefetcher {
    type Result = ();

    fn handle(&mut self, answered: Answered, ctx: &mut Self::Context) {
        let now = self.clock.now();
        match answered {
            Answered::Claimed { owner, answer: Ok(jobs) } => {
                let got = jobs.len();
                if got > 0 && owner == self.setup.identity.owner() {
                    self.setup.metrics.prefetch_count.increment();
                    self.setup.metrics.prefetch_jobs.add(got);
                    self.peers.push.do_send(PushSorted { jobs, source: Source::Claimed });
                } else if got > 0 {
                    // The lease was lost meanwhile: the claims died with it, and the room is free.
                    self.peers.room_back.do_send(RoomBack(got));
                    let claims = jobs.iter().map(ClaimedJob::claim).collect();
                    self.peers.store.release.do_send(Release { owner, claims, to: None });
                }
                self.machine.handle_claimed(now, Ok(got));
            }
            Answered::Claimed { answer: Err(error), .. } => {
                tracing::warn!(%error, "no jobs could be claimed");
                self.machine.handle_claimed(now, Err(ClaimFailed));
            }
            Answered::NextDue(Ok(after)) => self.machine.handle_next_due(now, after),
            // The next poll finds what is due.
            Answered::NextDue(Err(_)) => {}
            Answered::Lent(room) => self.machine.handle_idle(now, room),
        }
        self.dispatch(ctx);
    }
}
