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
use crate::load::{Load, LoadReport};
use crate::steal::{InTransit, Lifelines, Settled, offer_frame};
use crate::time::Instant;
use crate::wire::stream::Offer;

/// What a deque's owner may be told to do otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DequeConfig {
    /// Jobs that the node holds claimed and unstarted, up to [`DEQUE_CAPACITY_MAX`]; 0 on a
    /// node that runs none. More keeps
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
            capacity: config.capacity.min(DEQUE_CAPACITY_MAX),
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
    /// A job belongs to the node that `owner_of` says: its key's owner, or without a key the node that
    /// accepted it if that can run it. It is
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
                let affinity = owner_of(job);
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

    /// As [`Self::surrender`], and no more than makes the two equally busy: half alone would have two
    /// nodes with little work take the same jobs from each other.
    pub fn surrender_evenly(
        &mut self,
        now: Instant,
        thief: &Owner,
        max: usize,
        mine: &Load,
        theirs: &Load,
    ) -> OfferPlan {
        let even = usize::try_from(mine.surplus_over(theirs)).unwrap_or(usize::MAX);
        self.surrender(now, thief, max.min(even))
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

#[cfg(test)]
mod tests {
    use super::super::fixtures::{at_ms, claimed, id, job, node, numbers, owner, spec};
    use super::*;

    /// The deque of "a", whose first idle room of `capacity / 2` has come back.
    fn dispatcher(capacity: usize) -> Dispatcher {
        let mut it = Dispatcher::new(node("a"), DequeConfig { capacity, ..DequeConfig::default() });
        assert_eq!(effects(&mut it), [Effect::Idle { room: capacity.div_ceil(2) }]);
        it.handle_room_back(capacity.div_ceil(2));
        assert_eq!(effects(&mut it), []);
        it
    }

    fn effects(it: &mut Dispatcher) -> Vec<Effect> {
        std::iter::from_fn(|| it.poll_effect()).collect()
    }

    /// Jobs that no room was lent for, so that nothing but their number shows.
    fn push(it: &mut Dispatcher, now: Instant, jobs: impl IntoIterator<Item = u64>) {
        let jobs = jobs.into_iter().map(|n| (job(n), false)).collect();
        it.push_sorted(now, jobs, Source::Readopted);
    }

    fn runs(effects: &[Effect]) -> Vec<u64> {
        numbers(effects.iter().filter_map(|effect| match effect {
            Effect::Run { entry, .. } => Some(&entry.job.spec.id),
            _ => None,
        }))
    }

    fn offered(plan: &OfferPlan) -> Vec<u64> {
        numbers(plan.jobs.iter().map(|job| &job.spec.id))
    }

    fn claim(n: u64, token: u64) -> Claim {
        Claim { job: id(n), token: FencingToken(token) }
    }

    fn keyed(n: u64, key: &str) -> Arc<JobSpec> {
        Arc::new(JobSpec { key: Some(key.into()), ..spec(n) })
    }

    /// The key is the name of its owner; a job without one is its acceptor's.
    fn by_key(job: &JobSpec) -> NodeId {
        job.key.as_ref().map_or_else(|| job.origin.clone(), |key| node(key))
    }

    fn plan(it: &mut Dispatcher, jobs: &[Arc<JobSpec>]) -> Vec<(String, bool)> {
        let plans = it.plan_insert(jobs, by_key, 1_000);
        plans.into_iter().map(|plan| (plan.affinity.to_string(), plan.claim)).collect()
    }

    #[test]
    fn a_job_is_claimed_at_its_insert_if_it_is_mine_due_and_has_room() {
        let mut it = dispatcher(2);
        let jobs = [
            keyed(1, "b"),
            Arc::new(JobSpec { run_at_ms: 1_001, ..spec(2) }),
            Arc::new(JobSpec { run_at_ms: 1_000, ..spec(3) }),
            keyed(4, "a"),
            keyed(5, "a"),
        ];
        let expected = [("b", false), ("a", false), ("a", true), ("a", true), ("a", false)];
        assert_eq!(plan(&mut it, &jobs), expected.map(|(node, claim)| (node.into(), claim)));
        assert_eq!(it.reserved(), 2);
    }

    #[test]
    fn a_job_never_overtakes_one_of_its_priority_that_waits_in_the_store() {
        let mut it = dispatcher(1);
        let with = |n, priority| Arc::new(JobSpec { priority, ..spec(n) });
        let claims = |it: &mut Dispatcher, jobs: &[Arc<JobSpec>]| -> Vec<bool> {
            plan(it, jobs).into_iter().map(|(_, claim)| claim).collect()
        };
        let jobs = [with(1, 0), with(2, 3)];
        let plans = it.plan_insert(&jobs, by_key, 0);
        assert_eq!([plans[0].claim, plans[1].claim], [true, false], "2 spills");
        let done = jobs.into_iter().zip(plans);
        let outcomes = [InsertOutcome::Duplicate, InsertOutcome::Unclaimed];
        it.handle_inserted(
            at_ms(0),
            done.zip(outcomes).map(|((job, plan), outcome)| (job, plan, outcome)).collect(),
        );
        assert_eq!(claims(&mut it, &[with(3, 2), with(4, 3), with(5, 4)]), [false, false, true]);
        it.spill_drained();
        it.clear();
        assert_eq!(claims(&mut it, &[with(6, 0)]), [false], "room is still reserved for 5");
    }

    #[test]
    fn inserts_push_what_was_claimed_and_nudge_each_owner_of_the_rest_once() {
        let mut it = dispatcher(3);
        let later = Arc::new(JobSpec { run_at_ms: 9_000, ..(*keyed(7, "d")).clone() });
        let jobs = [
            keyed(1, "a"),
            keyed(2, "c"),
            keyed(3, "b"),
            keyed(4, "c"),
            keyed(5, "a"),
            keyed(6, "a"),
            later,
            keyed(8, "a"),
        ];
        let plans = it.plan_insert(&jobs, by_key, 1_000);
        assert_eq!(it.reserved(), 3);
        it.credit(at_ms(5), 1);
        use InsertOutcome::{Claimed, Duplicate, Failed, Unclaimed};
        let token = FencingToken(1);
        let outcomes = [
            Claimed(token),
            Unclaimed,
            Unclaimed,
            Unclaimed,
            Duplicate,
            Failed,
            Unclaimed,
            Unclaimed,
        ];
        let inserted = jobs.into_iter().zip(plans).zip(outcomes);
        it.handle_inserted(at_ms(7), inserted.map(|((job, plan), o)| (job, plan, o)).collect());
        let job = ClaimedJob { spec: keyed(1, "a"), token, attempt: 1 };
        let entry = Entry { job, owned: true, queued_at: at_ms(7), stolen: false };
        assert_eq!(
            effects(&mut it),
            [
                Effect::NudgeSelf,
                Effect::Nudge { node: node("b") },
                Effect::Nudge { node: node("c") },
                Effect::Run { entry, waited: Duration::ZERO },
            ]
        );
        assert_eq!((it.reserved(), it.queued(), it.credits()), (0, 0, 0));
    }

    #[test]
    fn a_claim_made_under_a_lost_lease_is_not_run() {
        let mut it = dispatcher(8);
        let jobs = [keyed(1, "a")];
        let plan = it.plan_insert(&jobs, by_key, 0).remove(0);
        push(&mut it, at_ms(0), [2, 3]);
        it.surrender(at_ms(0), &owner("t"), 1);
        assert_eq!(it.clear(), 2, "one queued and one in transit are forgotten");
        it.credit(at_ms(0), 1);
        effects(&mut it);
        let [job] = jobs;
        it.handle_inserted(at_ms(0), vec![(job, plan, InsertOutcome::Claimed(FencingToken(1)))]);
        assert_eq!((effects(&mut it), it.reserved(), it.queued()), (vec![], 0, 0));
    }

    #[test]
    fn each_credit_runs_one_job_and_says_how_long_it_waited() {
        let mut it = dispatcher(8);
        it.push_sorted(at_ms(10), vec![(job(1), true)], Source::Stolen);
        effects(&mut it);
        it.credit(at_ms(25), 2);
        let entry = Entry { job: job(1), owned: true, queued_at: at_ms(10), stolen: true };
        assert_eq!(effects(&mut it), [Effect::Run { entry, waited: Duration::from_millis(15) }]);
        push(&mut it, at_ms(30), [2, 3]);
        assert_eq!(runs(&effects(&mut it)), [3], "the second credit waited for a job");
        assert_eq!((it.queued(), it.credits(), it.counters().local_pops), (1, 0, 2));
    }

    #[test]
    fn idle_is_an_edge_and_lends_half_of_what_is_free() {
        let mut it = dispatcher(16);
        push(&mut it, at_ms(0), 0..4);
        assert_eq!(effects(&mut it), []);
        it.credit(at_ms(0), 1);
        assert_eq!(runs(&effects(&mut it)), [3], "3 are still above the mark of 2");
        it.credit(at_ms(0), 1);
        assert_eq!(effects(&mut it)[1..], [Effect::Idle { room: 7 }]);
        it.credit(at_ms(0), 5);
        assert_eq!(runs(&effects(&mut it)), [1, 0]);
        it.handle_room_back(7);
        assert_eq!((effects(&mut it), it.lent()), (vec![], 0), "nothing was found: no asking on");
        push(&mut it, at_ms(0), 10..12);
        assert_eq!(runs(&effects(&mut it)), [11, 10], "local work that never queues is no edge");
    }

    #[test]
    fn borrowed_room_that_brought_jobs_is_lent_again_when_low() {
        let mut it = dispatcher(16);
        assert_eq!(it.lend(), 8);
        it.push_sorted(at_ms(0), vec![(job(1), true), (job(2), true)], Source::Claimed);
        assert_eq!(effects(&mut it), [Effect::Idle { room: 4 }], "16 - 2 queued - 6 lent, halved");
        it.handle_room_back(10);
        assert_eq!((effects(&mut it), it.lent()), (vec![], 0));
    }

    #[test]
    fn lend_answers_at_once_and_a_full_deque_answers_by_idle() {
        let mut it = dispatcher(2);
        assert_eq!((it.lend(), it.lend(), it.lend()), (1, 1, 0));
        it.handle_room_back(1);
        assert_eq!(effects(&mut it), [Effect::Idle { room: 1 }], "room was asked for");
        it.handle_room_back(2);
        assert_eq!(effects(&mut it), []);
        push(&mut it, at_ms(0), 1..4);
        assert_eq!(it.lend(), 0, "3 queued are above the mark");
    }

    #[test]
    fn the_low_water_raises_the_mark_up_to_half_of_the_capacity() {
        let mut it = dispatcher(16);
        push(&mut it, at_ms(0), 0..8);
        it.set_low_water(7);
        assert_eq!(effects(&mut it), []);
        it.set_low_water(100);
        assert_eq!(effects(&mut it), [Effect::Idle { room: 4 }]);
        push(&mut it, at_ms(0), [8]);
        assert_eq!(it.lend(), 0);
    }

    #[test]
    fn a_thief_is_offered_half_rounded_up_within_both_bounds() {
        let config = DequeConfig { capacity: 100, max_steal_batch: 4, ..DequeConfig::default() };
        let mut it = Dispatcher::new(node("a"), config);
        push(&mut it, at_ms(0), 0..12);
        let sizes = [16, 3, 16, 16, 16, 16].map(|max| {
            let plan = it.surrender(at_ms(0), &owner("t"), max);
            (plan.offer, plan.jobs.len())
        });
        assert_eq!(sizes, [(1, 4), (2, 3), (3, 3), (4, 1), (5, 1), (0, 0)]);
        assert_eq!((it.queued(), it.in_transit()), (0, 12));
    }

    #[test]
    fn a_thief_no_less_busy_is_offered_nothing_and_remembered() {
        let mut it = dispatcher(100);
        push(&mut it, at_ms(0), 0..12);
        let busy = |queued| Load { queued, running: 2, slots: 2, ..Load::default() };
        let mut offered = |theirs| {
            it.surrender_evenly(at_ms(0), &owner("t"), 16, &busy(12), &busy(theirs)).jobs.len()
        };
        assert_eq!(offered(12), 0);
        assert_eq!(offered(11), 0, "a job less is no reason");
        assert_eq!(offered(8), 2, "both have ten then");
        assert_eq!(offered(0), 5, "half of what is left is less than what would be even");
    }

    #[test]
    fn a_settlement_forgets_what_was_taken_and_returns_the_rest_in_its_place() {
        let mut it = dispatcher(8);
        push(&mut it, at_ms(0), 1..5);
        let plan = it.surrender(at_ms(1), &owner("t"), 9);
        assert_eq!((plan.offer, offered(&plan)), (1, vec![1, 2]));
        push(&mut it, at_ms(2), [5]);
        it.settle(at_ms(3), &owner("t"), 1, &[id(2), id(99)]);
        assert_eq!((it.queued(), it.in_transit()), (4, 0));
        assert!(it.knows(&id(1)) && !it.knows(&id(2)));
        assert_eq!(it.counters().jobs_stolen_out, 1);
        let plan = it.surrender(at_ms(4), &owner("t"), 1);
        assert_eq!(offered(&plan), [1], "it is as old as it was");
    }

    #[test]
    fn a_settlement_counts_once_and_from_the_thief_of_the_offer_alone() {
        let mut it = dispatcher(8);
        push(&mut it, at_ms(0), 1..3);
        it.surrender(at_ms(0), &owner("t"), 9);
        let rebooted = Owner { generation: crate::id::Generation(2), ..owner("t") };
        for other in [owner("u"), rebooted] {
            it.settle(at_ms(0), &other, 1, &[id(1)]);
        }
        it.settle(at_ms(0), &owner("t"), 7, &[id(1)]);
        assert_eq!(it.in_transit(), 1);
        it.settle(at_ms(0), &owner("t"), 1, &[]);
        assert_eq!((it.in_transit(), it.queued()), (0, 2));
        it.settle(at_ms(0), &owner("t"), 1, &[id(1)]);
        assert_eq!((it.queued(), it.counters().jobs_stolen_out), (2, 0));
    }

    #[test]
    fn an_expired_offer_is_retaken_and_the_store_says_what_comes_back() {
        let mut it = dispatcher(16);
        push(&mut it, at_ms(0), 1..7);
        it.surrender(at_ms(1), &owner("t"), 9);
        assert_eq!(it.poll_timeout(), Some(at_ms(5_001)));
        it.handle_timeout(at_ms(5_000));
        assert_eq!(effects(&mut it), []);
        it.handle_timeout(at_ms(5_001));
        let claims = vec![claim(1, 1), claim(2, 1), claim(3, 1)];
        assert_eq!(effects(&mut it), [Effect::Retake { offer: 1, claims }]);
        assert_eq!(it.poll_timeout(), None);
        it.settle(at_ms(5_002), &owner("t"), 1, &[id(3)]);
        assert_eq!(it.in_transit(), 3, "only the store knows the tokens now");
        it.handle_retaken(at_ms(5_003), 1, Some(&[claim(2, 2), claim(99, 2)]));
        assert_eq!((it.queued(), it.in_transit(), it.counters().jobs_stolen_out), (4, 0, 2));
        let back = it.surrender(at_ms(5_004), &owner("u"), 1).jobs.remove(0);
        assert_eq!(back, claimed(spec(2), 2));
        it.handle_retaken(at_ms(5_005), 1, Some(&[claim(1, 2)]));
        assert!(!it.knows(&id(1)), "a second answer is ignored");
    }

    #[test]
    fn a_retake_that_failed_is_tried_again_and_may_be_settled_meanwhile() {
        let mut it = dispatcher(8);
        push(&mut it, at_ms(0), [1, 2]);
        it.surrender(at_ms(0), &owner("t"), 9);
        it.surrender(at_ms(0), &owner("u"), 9);
        it.handle_timeout(at_ms(5_000));
        assert_eq!(effects(&mut it).len(), 2);
        it.handle_retaken(at_ms(5_000), 1, None);
        it.handle_retaken(at_ms(5_000), 2, None);
        it.settle(at_ms(5_500), &owner("u"), 2, &[id(2)]);
        assert_eq!(it.poll_timeout(), Some(at_ms(6_000)));
        it.handle_timeout(at_ms(6_000));
        let again = Effect::Retake { offer: 1, claims: vec![claim(1, 1)] };
        assert_eq!(effects(&mut it), [again]);
    }

    #[test]
    fn who_asked_in_vain_is_told_when_there_is_work_and_not_at_every_job() {
        let mut it = dispatcher(64);
        for thief in ["t", "u", "v"] {
            assert_eq!(it.surrender(at_ms(0), &owner(thief), 4).jobs, []);
        }
        let hint = |thief, stealable| Effect::Hint { thief: node(thief), stealable };
        it.credit(at_ms(0), 1);
        push(&mut it, at_ms(0), [1]);
        assert_eq!(runs(&effects(&mut it)), [1], "an executor took it at once");
        push(&mut it, at_ms(1), [2]);
        assert_eq!(effects(&mut it), [hint("t", 1)], "one job, one thief");
        push(&mut it, at_ms(2), [3]);
        assert_eq!(effects(&mut it), [hint("t", 2), hint("u", 2)]);
        it.surrender(at_ms(3), &owner("u"), 1);
        it.forget(&node("v"));
        push(&mut it, at_ms(4), [4, 5]);
        assert_eq!(effects(&mut it), [], "t was told of 2, there are 3, u and v do not wait");
        push(&mut it, at_ms(1_002), [6]);
        assert_eq!(effects(&mut it), [hint("t", 4)]);
    }

    #[test]
    fn nothing_is_given_out_after_the_close() {
        let mut it = dispatcher(8);
        let jobs = [keyed(9, "a")];
        let plan = it.plan_insert(&jobs, by_key, 0).remove(0);
        push(&mut it, at_ms(0), 1..5);
        it.surrender(at_ms(0), &owner("t"), 1);
        assert_eq!(it.close(), [claim(2, 1), claim(3, 1), claim(4, 1)]);
        it.credit(at_ms(1), 4);
        assert_eq!(it.surrender(at_ms(1), &owner("u"), 4).jobs, []);
        assert_eq!(it.lend(), 0);
        let release = |n, token| Effect::Release { claims: vec![claim(n, token)] };
        it.settle(at_ms(1), &owner("t"), 1, &[]);
        push(&mut it, at_ms(1), [7]);
        let [job] = jobs;
        it.handle_inserted(at_ms(1), vec![(job, plan, InsertOutcome::Claimed(FencingToken(1)))]);
        assert_eq!(effects(&mut it), [release(1, 1), release(7, 1), release(9, 1)]);
        assert_eq!(plan_after_close(&mut it), [("a".into(), false)]);
    }

    fn plan_after_close(it: &mut Dispatcher) -> Vec<(String, bool)> {
        plan(it, &[keyed(10, "a")])
    }
}
