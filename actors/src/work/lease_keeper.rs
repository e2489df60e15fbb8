//! `LeaseKeeper`: carries the lease rules, the holder's and the reaper's.
//!
//! Owns this node's lease deadline and what it has observed of others. Receives its own timer,
//! [`MembershipChanged`], [`RegisterAgain`] from the overseer. Sends `Renew`, `Leases`, `Reap`,
//! `ClaimsOf`, `Readopt` and `Register` to the store, [`UnknownClaims`] and [`PushSorted`] to the
//! deque's owner, [`JobEvent`] to the result collector, [`NodeNotice`] to the overseer; on a lost lease [`CancelAll`] to the executor,
//! [`ClearDeque`] to the deque's owner and [`ForgetSteals`] to the stealer, then registers a new
//! generation and tells the membership store. On death the node stops.

use std::sync::Arc;

use actix::prelude::*;
use meshwork_protocol::deque::Source;
use meshwork_protocol::id::{Generation, Owner};
use meshwork_protocol::job::{Claim, ClaimedJob};
use meshwork_protocol::lease::{
    Keeper, KeeperEffect, LeaseConfig, Observer, ObserverEffect, Orphans, OrphansEffect,
    ReapOutcome, RenewOutcome,
};
use meshwork_protocol::swim::MembershipEvent;
use meshwork_protocol::time::Instant;

use crate::clock::Clock;
use crate::fair::tenant_executor::CancelAll;
use crate::identity::{Identity, Lease};
use crate::mesh::membership_store::{GenerationChanged, NodeNotice};
use crate::metrics::Metrics;
use crate::start::{Alarm, Timed};
use crate::store::messages::{
    ClaimsOf, LeaseRow, Leases, Readopt, Reap, Reaped, Register, Registered, Renew, StoreError,
    StoreHandle, StoreResult,
};
use crate::subscribers::MembershipChanged;
use crate::work::deque_owner::{ClearDeque, PushSorted, UnknownClaims};
use crate::work::job_events::JobEvent;
use crate::work::stealer::ForgetSteals;

/// Register a generation of at least this one: the mesh remembers a newer one than the store does.
#[derive(Message)]
#[rtype(result = "()")]
pub struct RegisterAgain {
    /// The lowest that will do.
    pub at_least: Generation,
}

#[derive(Message)]
#[rtype(result = "()")]
enum Answered {
    Renewed { owner: Owner, sent_at: Instant, answer: StoreResult<()> },
    Registered { sent_at: Instant, at_least: Generation, answer: StoreResult<Registered> },
    Leases(StoreResult<Vec<LeaseRow>>),
    Reaped { owner: Owner, answer: StoreResult<Option<Reaped>> },
    Listed { owner: Owner, listed: Vec<Claim>, unknown: Vec<Claim> },
    Readopted { owner: Owner, answer: StoreResult<Vec<ClaimedJob>> },
}

/// Whom the keeper tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// `TenantExecutor`.
    pub cancel: Recipient<CancelAll>,
    /// `DequeOwner`.
    pub clear: Recipient<ClearDeque>,
    /// `DequeOwner`.
    pub known: Recipient<UnknownClaims>,
    /// `DequeOwner`.
    pub push: Recipient<PushSorted>,
    /// `Stealer`.
    pub forget: Recipient<ForgetSteals>,
    /// `MembershipStore`.
    pub generation: Recipient<GenerationChanged>,
    /// `Overseer`.
    pub notices: Recipient<NodeNotice>,
    /// `ResultCollector`.
    pub events: Recipient<JobEvent>,
}

/// What the keeper is built with.
pub struct Setup {
    /// Who this node is.
    pub identity: Arc<Identity>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
    /// How long leases hold.
    pub config: LeaseConfig,
    /// What the registration of the present boot brought.
    pub registered: Registered,
    /// The holder's side of the lease that it granted.
    pub keeper: Keeper,
    /// Spreads the scans of many nodes.
    pub seed: u64,
}

/// The actor.
pub struct LeaseKeeper {
    identity: Arc<Identity>,
    metrics: Arc<Metrics>,
    config: LeaseConfig,
    /// None while a new generation is being registered.
    keeper: Option<Keeper>,
    /// What the first registration requeued, until it is told.
    before: Option<Registered>,
    observer: Observer,
    orphans: Orphans,
    clock: Clock,
    alarm: Alarm,
    peers: Peers,
}

impl LeaseKeeper {
    /// The keeper of the lease that was registered.
    pub fn new(setup: Setup, peers: Peers) -> Self {
        let Setup { identity, metrics, config, registered, keeper, seed } = setup;
        let clock = Clock;
        let now = clock.now();
        Self {
            observer: Observer::new(config, identity.owner(), seed, now),
            orphans: Orphans::new(config, now),
            keeper: Some(keeper),
            before: Some(registered),
            identity,
            metrics,
            config,
            clock,
            alarm: Alarm::default(),
            peers,
        }
    }

    fn dispatch(&mut self, ctx: &mut Context<Self>) {
        while let Some(effect) = self.keeper.as_mut().and_then(Keeper::poll_effect) {
            match effect {
                KeeperEffect::Renew { sent_at } => self.renew(sent_at, ctx),
                KeeperEffect::Lost { reason } => {
                    tracing::error!(?reason, "the lease is lost");
                    self.metrics.leases_lost.increment();
                    self.start_anew(self.identity.generation().next(), ctx);
                }
            }
        }
        if let Some(keeper) = &self.keeper {
            let (generation, deadline) = (self.identity.generation(), keeper.deadline());
            self.identity.set_lease(Lease { generation, deadline });
        }
        while let Some(effect) = self.observer.poll_effect() {
            self.observe(effect, ctx);
        }
        while let Some(effect) = self.orphans.poll_effect() {
            self.adopt(effect, ctx);
        }
        let due = [
            self.keeper.as_ref().and_then(Keeper::poll_timeout),
            self.observer.poll_timeout(),
            self.orphans.poll_timeout(),
        ];
        self.alarm.set(ctx, self.clock, due.into_iter().flatten().min());
    }

    fn renew(&self, sent_at: Instant, ctx: &Context<Self>) {
        let owner = self.identity.owner();
        let renew = self.peers.store.renew.send(Renew { owner: owner.clone() });
        let me = ctx.address();
        actix::spawn(async move {
            let answer = renew.await.unwrap_or(Err(StoreError::Stopped));
            me.do_send(Answered::Renewed { owner, sent_at, answer });
        });
    }

    fn observe(&self, effect: ObserverEffect, ctx: &Context<Self>) {
        let me = ctx.address();
        match effect {
            ObserverEffect::Scan => {
                let leases = self.peers.store.leases.send(Leases);
                actix::spawn(async move {
                    let answer = leases.await.unwrap_or(Err(StoreError::Stopped));
                    me.do_send(Answered::Leases(answer));
                });
            }
            ObserverEffect::Reap { owner, renewals } => {
                let reap = self.peers.store.reap.send(Reap { owner: owner.clone(), renewals });
                actix::spawn(async move {
                    let answer = reap.await.unwrap_or(Err(StoreError::Stopped));
                    me.do_send(Answered::Reaped { owner, answer });
                });
            }
        }
    }

    fn adopt(&self, effect: OrphansEffect, ctx: &Context<Self>) {
        let me = ctx.address();
        let owner = self.identity.owner();
        match effect {
            OrphansEffect::List => {
                let list = self.peers.store.claims_of.send(ClaimsOf { owner: owner.clone() });
                let known = self.peers.known.clone();
                actix::spawn(async move {
                    let Ok(Ok(listed)) = list.await else { return };
                    let Ok(unknown) = known.send(UnknownClaims(listed.clone())).await else {
                        return;
                    };
                    me.do_send(Answered::Listed { owner, listed, unknown });
                });
            }
            OrphansEffect::Readopt { claims } => {
                let readopt =
                    self.peers.store.readopt.send(Readopt { owner: owner.clone(), claims });
                actix::spawn(async move {
                    let answer = readopt.await.unwrap_or(Err(StoreError::Stopped));
                    me.do_send(Answered::Readopted { owner, answer });
                });
            }
        }
    }

    /// Forgets all that the present generation holds, and registers another.
    fn start_anew(&mut self, at_least: Generation, ctx: &mut Context<Self>) {
        self.keeper = None;
        self.identity.end_lease();
        self.peers.clear.do_send(ClearDeque);
        self.peers.forget.do_send(ForgetSteals);
        // Registering gives this node's jobs to others: no handler may be polled after that.
        let cancelled = self.peers.cancel.send(CancelAll).into_actor(self);
        ctx.spawn(cancelled.map(move |_, keeper, ctx| keeper.register(at_least, ctx)));
    }

    /// Another process has this node's name: of two that live, the newer boot goes on.
    fn yield_to(&self, by: Generation) {
        self.peers.notices.do_send(NodeNotice::Fenced { by });
    }

    /// What an older boot of this node had, and a registration requeued.
    fn requeued_before(&self, registered: Registered) {
        let Registered { generation: _, requeued, dead } = registered;
        if requeued.is_empty() && dead.is_empty() {
            return;
        }
        self.metrics.jobs_requeued.add(requeued.len());
        tracing::warn!(
            jobs = requeued.len(),
            dead = dead.len(),
            "an older boot's jobs are requeued"
        );
        self.peers.events.do_send(JobEvent::Requeued {
            from: self.identity.owner(),
            buffered: requeued,
            interrupted: Vec::new(),
            dead,
        });
    }

    fn register(&self, at_least: Generation, ctx: &Context<Self>) {
        let sent_at = self.clock.now();
        let node = self.identity.node.clone();
        // Reaped by another node, the newest boot on record is still this one. Any other was
        // registered by somebody who has the same name.
        let over = Some(self.identity.generation());
        let register = Register { node, at_least, gossip: Some(self.identity.gossip()), over };
        let register = self.peers.store.register.send(register);
        let me = ctx.address();
        actix::spawn(async move {
            let answer = register.await.unwrap_or(Err(StoreError::Stopped));
            me.do_send(Answered::Registered { sent_at, at_least, answer });
        });
    }

    fn requeued(&self, from: Owner, reaped: Reaped) {
        let Reaped { buffered, interrupted, dead } = reaped;
        self.metrics.leases_reaped.increment();
        self.metrics.jobs_requeued.add(buffered.len() + interrupted.len());
        tracing::warn!(
            %from,
            buffered = buffered.len(),
            interrupted = interrupted.len(),
            dead = dead.len(),
            "a lease was reaped"
        );
        self.peers.events.do_send(JobEvent::Requeued { from, buffered, interrupted, dead });
    }
}

impl Actor for LeaseKeeper {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(registered) = self.before.take() {
            self.requeued_before(registered);
        }
        self.dispatch(ctx);
    }
}

impl Timed for LeaseKeeper {
    fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    fn due(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.now();
        if let Some(keeper) = &mut self.keeper {
            keeper.handle_timeout(now);
        }
        self.observer.handle_timeout(now);
        self.orphans.handle_timeout(now);
        self.dispatch(ctx);
    }
}

impl Handler<RegisterAgain> for LeaseKeeper {
    type Result = ();

    fn handle(&mut self, RegisterAgain { at_least }: RegisterAgain, ctx: &mut Self::Context) {
        // While a registration is under way, its outcome decides whether another is needed.
        if self.keeper.is_some() && at_least > self.identity.generation() {
            self.start_anew(at_least, ctx);
            self.dispatch(ctx);
        }
    }
}

impl Handler<MembershipChanged> for LeaseKeeper {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, ctx: &mut Self::Context) {
        if let MembershipEvent::Died { member, .. } = event {
            self.observer.handle_member_dead(self.clock.now(), &member.id);
            self.dispatch(ctx);
        }
    }
}

impl Handler<Answered> for LeaseKeeper {
    type Result = ();

    fn handle(&mut self, answered: Answered, ctx: &mut Self::Context) {
        let now = self.clock.now();
        let present = self.identity.owner();
        match answered {
            Answered::Renewed { owner, sent_at, answer } if owner == present => {
                let outcome = match answer {
                    Ok(()) => RenewOutcome::Renewed,
                    Err(StoreError::LeaseLost(_)) => RenewOutcome::Lost,
                    Err(error) => {
                        tracing::warn!(%error, "the lease could not be renewed");
                        RenewOutcome::Failed
                    }
                };
                if let Some(keeper) = &mut self.keeper {
                    keeper.handle_renewed(now, sent_at, outcome);
                }
            }
            Answered::Registered { sent_at, answer: Ok(registered), .. } => {
                let generation = registered.generation;
                tracing::info!(%generation, "a new generation is registered");
                let keeper = Keeper::new(self.config, sent_at);
                self.identity.set_lease(Lease { generation, deadline: keeper.deadline() });
                self.requeued_before(registered);
                self.keeper = Some(keeper);
                self.observer.handle_registered(self.identity.owner());
                self.orphans = Orphans::new(self.config, now);
                self.peers.generation.do_send(GenerationChanged(generation));
            }
            Answered::Registered { answer: Err(StoreError::Taken(_, by)), .. } => self.yield_to(by),
            Answered::Registered { at_least, answer: Err(error), .. } => {
                tracing::error!(%error, "no new generation could be registered; trying again");
                ctx.run_later(self.config.period(), move |keeper, ctx| {
                    keeper.register(at_least, ctx);
                });
            }
            Answered::Leases(Ok(rows)) => {
                let rows = rows.into_iter().filter(|row| !row.reaped);
                self.observer.handle_leases(now, rows.map(|row| (row.owner, row.renewals)));
            }
            Answered::Leases(Err(error)) => {
                tracing::warn!(%error, "the leases could not be listed");
            }
            Answered::Reaped { owner, answer } => {
                let outcome = match answer {
                    Ok(Some(reaped)) => {
                        self.requeued(owner.clone(), reaped);
                        ReapOutcome::Reaped
                    }
                    Ok(None) => ReapOutcome::Moved,
                    Err(error) => {
                        tracing::warn!(%error, %owner, "a lease could not be reaped");
                        ReapOutcome::Failed
                    }
                };
                self.observer.handle_reaped(now, &owner, outcome);
            }
            Answered::Listed { owner, listed, unknown } if owner == present => {
                self.orphans.handle_listed(now, listed, |claim| !unknown.contains(claim));
            }
            Answered::Readopted { owner, answer: Ok(jobs) } if owner == present => {
                if !jobs.is_empty() {
                    tracing::warn!(jobs = jobs.len(), "claims without memory were taken up again");
                    let source = Source::Readopted;
                    self.peers.push.do_send(PushSorted { jobs, source });
                }
            }
            Answered::Readopted { answer: Err(error), .. } => {
                tracing::warn!(%error, "claims without memory could not be taken up");
            }
            // Answers to a generation that is over.
            Answered::Renewed { .. } | Answered::Listed { .. } | Answered::Readopted { .. } => {}
        }
        self.dispatch(ctx);
    }
}
