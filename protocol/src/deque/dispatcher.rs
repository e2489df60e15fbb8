//! The rules of the deque's owner.
//!
//! Room is counted so that nothing on its way here can overfill the deque: a place is either taken
//! (queued, or in transit to a thief who may not take it), reserved (an insert is under way), or lent
//! (to whoever looks for work elsewhere, until the jobs arrive or the room comes back). These never
//! exceed the capacity together. Only what was claimed before anyone could ask goes past it: claims
//! that are [readopted](Source::Readopted).
//!
//! At most half of what is free is lent at a time; the other half stays for what is enqueued here
//! meanwhile. Whoever borrowed gives back what it has no use for at once, and asks again
//! ([`Dispatcher::lend`]) when it has: room that idles abroad would turn local work away.
//!
//! [`Effect::Idle`] follows an edge, not a level. It is armed when the deque rises above its mark,
//! when borrowed room brought jobs (where some were, more may be), and when room was asked for and
//! none was free; it goes out, once, when an armed deque is at or below its mark. So a node that
//! finds nothing stays quiet, and one that found something looks again.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::order::{Deque, Entry};
use crate::id::{FencingToken, JobId, NodeId, Owner};
use crate::job::{Claim, ClaimedJob, JobSpec};
use crate::limits::{
    DEQUE_CAPACITY_MAX, LIFELINES_MAX, OFFER_EXPIRY, RETAKE_RETRY, STEAL_BATCH_MAX,
};
use crate::load::LoadReport;
use crate::steal::{InTransit, Lifelines, Settled, offer_frame};
use crate::time::Instant;
use crate::wire::stream::Offer;

/// What a deque's owner may be told to do otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DequeConfig {
    /// Jobs that the node holds claimed and unstarted, 1 to [`DEQUE_CAPACITY_MAX`]. More keeps
    /// executors busy through a slow store; less leaves more for nodes that are free sooner.
    pub capacity: usize,
    /// At or below so many queued jobs the node looks for more.
    pub steal_threshold: usize,
    /// Most jobs in one offer, 1 to [`STEAL_BATCH_MAX`].
    pub max_steal_batch: usize,
    /// Every so many pops the oldest job of all is taken, whatever its priority. 0: never.
    pub front_every: u32,
    /// A job this old is the next of its priority.
    pub front_age_max: Duration,
    /// How long an offer stands before it is retaken.
    pub offer_expiry: Duration,
    /// Most idle peers remembered, at most [`LIFELINES_MAX`].
    pub lifelines_max: usize,
}

impl Default for DequeConfig {
    fn default() -> Self {
        Self {
            capacity: 64,
            steal_threshold: 2,
            max_steal_batch: 16,
            front_every: 8,
            front_age_max: Duration::from_secs(1),
            offer_expiry: OFFER_EXPIRY,
            lifelines_max: LIFELINES_MAX,
        }
    }
}

/// How a job is to be inserted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The node that should run it.
    pub affinity: NodeId,
    /// Insert it already claimed by this node. Room is reserved for it.
    pub claim: bool,
    due: bool,
    epoch: u64,
}

/// What the store did with a job that was to be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertOutcome {
    /// It is in the store, nobody's.
    Unclaimed,
    /// It is in the store, this node's by this token, attempt 1.
    Claimed(FencingToken),
    /// It was there before; nothing was written.
    Duplicate,
    /// The insert failed: it is not in the store.
    Failed,
}

/// Where jobs that are pushed came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Claimed in the store, into room that was lent.
    Claimed,
    /// Taken from a peer, into room that was lent.
    Stolen,
    /// Claims that the store says are this node's and that it had no memory of: no room was lent.
    Readopted,
}

/// What a thief is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferPlan {
    /// Names the offer in its settlement; 0 when it is empty.
    pub offer: u64,
    /// What is offered; none makes the thief a lifeline.
    pub jobs: Vec<ClaimedJob>,
    /// How long it stands.
    pub expires_after: Duration,
}

impl OfferPlan {
    /// The answer to the request numbered `seq`. Always fits a frame: what is too large to travel is
    /// named, and the thief reads it from the store.
    pub fn into_frame(self, seq: u32, load: Option<LoadReport>) -> Offer {
        offer_frame(seq, self.offer, self.jobs, self.expires_after, load)
    }
}

/// What the owner of the deque is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// Hand this job to an executor: it spends one credit.
    Run {
        /// The job.
        entry: Entry,
        /// How long it was in the deque.
        waited: Duration,
    },
    /// Work is wanted: this room is lent to whoever finds some. It comes back as
    /// [`Dispatcher::push_sorted`], [`Dispatcher::handle_room_back`], or some of both.
    Idle {
        /// Jobs that may arrive.
        room: usize,
    },
    /// Retake these claims in the store, and answer with [`Dispatcher::handle_retaken`].
    Retake {
        /// The offer that expired.
        offer: u64,
        /// The claims as offered.
        claims: Vec<Claim>,
    },
    /// Tell a peer that asked in vain that there is work now.
    Hint {
        /// Whom.
        thief: NodeId,
        /// How many jobs a thief could get.
        stealable: u32,
    },
    /// Tell a peer that the store has jobs for it.
    Nudge {
        /// Whom.
        node: NodeId,
    },
    /// The store has jobs for this node.
    NudgeSelf,
    /// Give these claims back to the store: they came after the deque was closed.
    Release {
        /// The claims.
        claims: Vec<Claim>,
    },
}

/// What has been counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DequeCounters {
    /// Jobs handed to executors.
    pub local_pops: u64,
    /// Jobs that thieves took.
    pub jobs_stolen_out: u64,
}

/// Decides what is claimed, run, offered and asked for.
///
/// Each input may queue effects; [`Dispatcher::poll_effect`] hands them out until
/// it returns `None`. [`Dispatcher::poll_timeout`] says when [`Dispatcher::handle_timeout`] is due,
/// and is asked again after each input. A new dispatcher has its first [`Effect::Idle`] ready.
#[derive(Debug)]
pub struct Dispatcher {
    me: NodeId,
    config: DequeConfig,
    deque: Deque,
    transit: InTransit,
    lifelines: Lifelines,
    credits: usize,
    reserved: usize,
    lent: usize,
    spilled: Option<i16>,
    low_water: usize,
    armed: bool,
    closed: bool,
    epoch: u64,
    counters: DequeCounters,
    effects: VecDeque<Effect>,
}

impl Dispatcher {
    /// The deque of node `me`, empty and without credits. Values of `config` outside their ranges
    /// count as the nearest inside.
    pub fn new(me: NodeId, config: DequeConfig) -> Self {
        let config = DequeConfig {
            capacity: config.capacity.clamp(1, DEQUE_CAPACITY_MAX),
            max_steal_batch: config.max_steal_batch.clamp(1, STEAL_BATCH_MAX),
            lifelines_max: config.lifelines_max.min(LIFELINES_MAX),
            ..config
        };
        let mut this = Self {
            me,
            config,
            deque: Deque::new(config.front_every, config.front_age_max),
            transit: InTransit::default(),
            lifelines: Lifelines::new(config.lifelines_max),
            credits: 0,
            reserved: 0,
            lent: 0,
            spilled: None,
            low_water: 0,
            armed: true,
            closed: false,
            epoch: 0,
            counters: DequeCounters::default(),
            effects: VecDeque::new(),
        };
        this.lend_when_low();
        this
    }

    /// The next thing to do.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When the next offer expires, or a failed retake is to be tried again.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.transit.next_deadline()
    }

    /// Jobs in the deque.
    pub fn queued(&self) -> usize {
        self.deque.len()
    }

    /// Jobs in the deque that a thief could get.
    pub fn stealable(&self) -> usize {
        self.deque.stealable()
    }

    /// Jobs offered and neither settled nor retaken.
    pub fn in_transit(&self) -> usize {
        self.transit.jobs()
    }

    /// Room reserved for inserts under way.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Room lent and not yet returned or filled.
    pub fn lent(&self) -> usize {
        self.lent
    }

    /// Jobs that executors would take at once.
    pub fn credits(&self) -> usize {
        self.credits
    }

    /// Whether the job is in the deque or in transit. What runs is the executors' to know.
    pub fn knows(&self, job: &JobId) -> bool {
        self.deque.contains(job) || self.transit.contains(job)
    }

    /// What has been counted.
    pub fn counters(&self) -> DequeCounters {
        self.counters
    }

    /// Decides how `jobs` are to be inserted, and reserves room for those to be claimed.
    ///
    /// A job belongs to the node that `owner_of` its key says, or without a key to this one. It is
    /// inserted claimed if that is this node, it is due at `now_unix_ms`, room can be reserved, and
    /// nothing of this node of the same or a higher priority is known to wait in the store: it would
    /// overtake that. Every plan comes back in [`Self::handle_inserted`], whatever became of it.
    pub fn plan_insert(
        &mut self,
        jobs: &[Arc<JobSpec>],
        owner_of: impl Fn(&JobSpec) -> NodeId,
        now_unix_ms: u64,
    ) -> Vec<Plan> {
        jobs.iter()
            .map(|job| {
                let affinity = if job.key.is_some() { owner_of(job) } else { self.me.clone() };
                let due = job.run_at_ms <= now_unix_ms;
                let mine_now = due && affinity == self.me;
                let claim = mine_now
                    && !self.closed
                    && self.free() > 0
                    && self.spilled.is_none_or(|waiting| job.priority > waiting);
                if claim {
                    self.reserved += 1;
                } else if mine_now {
                    self.spilled = self.spilled.max(Some(job.priority));
                }
                Plan { affinity, claim, due, epoch: self.epoch }
            })
            .collect()
    }

    /// Takes in what became of planned inserts.
    pub fn handle_inserted(
        &mut self,
        now: Instant,
        inserted: Vec<(Arc<JobSpec>, Plan, InsertOutcome)>,
    ) {
        let mut entries = Vec::new();
        let mut nudged = BTreeSet::new();
        for (spec, plan, outcome) in inserted {
            self.reserved = self.reserved.saturating_sub(usize::from(plan.claim));
            match outcome {
                // A claim made under a lease that was lost since is nobody's to run.
                InsertOutcome::Claimed(token) if plan.epoch == self.epoch => {
                    let job = ClaimedJob { spec, token, attempt: 1 };
                    entries.push(Entry { job, owned: true, queued_at: now, stolen: false });
                }
                InsertOutcome::Unclaimed if plan.due => {
                    if plan.affinity == self.me {
                        self.spilled = self.spilled.max(Some(spec.priority));
                    }
                    nudged.insert(plan.affinity);
                }
                _ => {}
            }
        }
        for node in nudged {
            self.effects.push_back(if node == self.me {
                Effect::NudgeSelf
            } else {
                Effect::Nudge { node }
            });
        }
        self.add(now, entries);
    }

    /// Takes in claimed jobs, each with whether this node owns its key.
    pub fn push_sorted(&mut self, now: Instant, jobs: Vec<(ClaimedJob, bool)>, source: Source) {
        if source != Source::Readopted {
            self.lent = self.lent.saturating_sub(jobs.len());
            self.armed |= !jobs.is_empty();
        }
        let stolen = source == Source::Stolen;
        let entry = |(job, owned)| Entry { job, owned, queued_at: now, stolen };
        self.add(now, jobs.into_iter().map(entry).collect());
    }

    /// Room that was lent comes back unused.
    pub fn handle_room_back(&mut self, room: usize) {
        self.lent = self.lent.saturating_sub(room);
        self.lend_when_low();
    }

    /// Lends room to someone who knows where work is, without waiting for [`Effect::Idle`]. 0 when
    /// the deque is above its mark, or full, or closed; an `Idle` follows when that has changed.
    pub fn lend(&mut self) -> usize {
        if !self.is_low() {
            return 0;
        }
        let room = self.free().div_ceil(2);
        self.armed |= room == 0;
        self.lent += room;
        room
    }

    /// A claim for this node's own jobs came back short: none of them waits in the store.
    ///
    /// An insert that spilled after that claim was made is forgotten with the rest. It loses its
    /// place to later ones, no more: it was nudged for.
    pub fn spill_drained(&mut self) {
        self.spilled = None;
    }

    /// An executor can take `n` more jobs.
    pub fn credit(&mut self, now: Instant, n: usize) {
        self.credits = self.credits.saturating_add(n);
        self.advance(now);
    }

    /// Offers jobs to a thief: half of those that can be stolen, up to `max` and the largest batch.
    ///
    /// The half is rounded up. Jobs are only queued while no executor has a credit, so the last one
    /// waits too, and a thief who found the trip worth its cost may have it. An empty offer makes the
    /// thief a lifeline; to refuse a thief, ask with a `max` of 0.
    pub fn surrender(&mut self, now: Instant, thief: &Owner, max: usize) -> OfferPlan {
        let expires_after = self.config.offer_expiry;
        let empty = OfferPlan { offer: 0, jobs: Vec::new(), expires_after };
        if self.closed || thief.node == self.me {
            return empty;
        }
        let half = self.deque.stealable().div_ceil(2);
        let entries = self.deque.steal(half.min(max).min(self.config.max_steal_batch));
        if entries.is_empty() {
            self.lifelines.remember(&thief.node);
            return empty;
        }
        self.lifelines.forget(&thief.node);
        let jobs = entries.iter().map(|entry| entry.job.clone()).collect();
        let offer = self.transit.offer(thief.clone(), entries, now + expires_after);
        self.advance(now);
        OfferPlan { offer, jobs, expires_after }
    }

    /// A thief says which jobs of an offer it got: those are forgotten, the others come back.
    ///
    /// Ignored when the offer is settled already, was made to another thief, or is being retaken:
    /// the store's answer to the retake says the same, with the tokens that hold then.
    pub fn settle(&mut self, now: Instant, thief: &Owner, offer: u64, taken: &[JobId]) {
        if let Some(Settled { returned, gone }) = self.transit.settle(thief, offer, taken) {
            self.counters.jobs_stolen_out += gone as u64;
            self.add(now, returned);
        }
    }

    /// Asks for the retake of offers that expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some((offer, claims)) = self.transit.expire(now) {
            self.effects.push_back(Effect::Retake { offer, claims });
        }
    }

    /// What a retake brought: the claims that this node holds again, with their new tokens. The rest
    /// is forgotten: the thief has it. `None` when the store did not do it; it is tried again.
    pub fn handle_retaken(&mut self, now: Instant, offer: u64, held: Option<&[Claim]>) {
        let Some(held) = held else {
            self.transit.retake_failed(offer, now + RETAKE_RETRY);
            return;
        };
        if let Some(Settled { returned, gone }) = self.transit.retaken(offer, held) {
            self.counters.jobs_stolen_out += gone as u64;
            self.add(now, returned);
        }
    }

    /// Looks for work already at so many queued jobs, so that the deque does not run dry during a
    /// round trip. Never over half of the capacity, nor below the steal threshold.
    pub fn set_low_water(&mut self, jobs: usize) {
        self.low_water = jobs;
        self.lend_when_low();
    }

    /// A peer is dead or gone: it waits for no hint.
    pub fn forget(&mut self, node: &NodeId) {
        self.lifelines.forget(node);
    }

    /// The lease is lost: every claim is forgotten, for others have them. Returns how many. Room
    /// that was reserved or lent comes back as usual.
    pub fn clear(&mut self) -> usize {
        let forgotten = self.deque.drain().len() + self.transit.clear();
        self.epoch += 1;
        self.spilled = None;
        self.armed = true;
        self.lend_when_low();
        forgotten
    }

    /// Closes the deque and returns what is left, to be released. Nothing is handed out afterwards;
    /// what still comes in, or comes back from thieves, leaves as [`Effect::Release`].
    pub fn close(&mut self) -> Vec<Claim> {
        self.closed = true;
        self.deque.drain().iter().map(|entry| entry.job.claim()).collect()
    }

    fn free(&self) -> usize {
        let taken = self.deque.len() + self.transit.jobs();
        self.config.capacity.saturating_sub(taken + self.reserved + self.lent)
    }

    fn is_low(&self) -> bool {
        let mark = self.config.steal_threshold.max(self.low_water.min(self.config.capacity / 2));
        !self.closed && self.deque.len() <= mark
    }

    fn add(&mut self, now: Instant, entries: Vec<Entry>) {
        if self.closed {
            let claims: Vec<Claim> = entries.iter().map(|entry| entry.job.claim()).collect();
            if !claims.is_empty() {
                self.effects.push_back(Effect::Release { claims });
            }
            return;
        }
        let grows = !entries.is_empty();
        self.deque.push_sorted(entries);
        self.advance(now);
        if grows {
            let stealable = u32::try_from(self.deque.stealable()).unwrap_or(u32::MAX);
            for thief in self.lifelines.hints(now, stealable) {
                self.effects.push_back(Effect::Hint { thief, stealable });
            }
        }
    }

    fn advance(&mut self, now: Instant) {
        if self.closed {
            return;
        }
        while self.credits > 0 {
            let Some(entry) = self.deque.pop(now) else { break };
            self.credits -= 1;
            self.counters.local_pops += 1;
            let waited = now.saturating_since(entry.queued_at);
            self.effects.push_back(Effect::Run { entry, waited });
        }
        self.lend_when_low();
    }

    fn lend_when_low(&mut self) {
        if !self.is_low() {
            self.armed = true;
            return;
        }
        let room = self.free().div_ceil(2);
        if self.armed && room > 0 {
            self.armed = false;
            self.lent += room;
            self.effects.push_back(Effect::Idle { room });
        }
    }
}
