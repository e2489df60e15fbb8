//! Random interleavings of everything that can happen to a [`Dispatcher`], held against a model that
//! knows where each job must be.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::fixtures::{claimed, node, owner, spec};
use super::{DequeConfig, Dispatcher, Effect, InsertOutcome, Plan, Source};
use crate::id::{FencingToken, JobId, Owner};
use crate::job::{Claim, JobSpec};
use crate::time::Instant;

#[derive(Clone, Debug)]
enum Op {
    Plan(Vec<i16>),
    /// Of the oldest insert under way; which outcome each job has.
    Inserted(Vec<u8>),
    /// Of the room that is lent, so much comes back as jobs, and so much unused.
    Found(usize, usize),
    Readopt(usize),
    Lend,
    Credit(usize),
    Surrender(u8, usize),
    /// Which of the offers ever made, whether by its thief, which jobs were taken.
    Settle(usize, bool, u8),
    Wait(u64),
    /// Of the oldest retake under way: which jobs are held again; none if it failed.
    Retaken(Option<u8>),
    LowWater(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop::collection::vec(-1i16..2, 1..5).prop_map(Op::Plan),
        4 => prop::collection::vec(0u8..6, 4).prop_map(Op::Inserted),
        4 => (0usize..6, 0usize..9).prop_map(|(found, back)| Op::Found(found, back)),
        1 => (1usize..3).prop_map(Op::Readopt),
        2 => Just(Op::Lend),
        5 => (1usize..4).prop_map(Op::Credit),
        5 => (0u8..3, 0usize..6).prop_map(|(thief, max)| Op::Surrender(thief, max)),
        4 => (any::<usize>(), prop::bool::weighted(0.8), any::<u8>())
            .prop_map(|(offer, own, taken)| Op::Settle(offer, own, taken)),
        3 => (0u64..3_000).prop_map(Op::Wait),
        3 => prop::option::weighted(0.8, any::<u8>()).prop_map(Op::Retaken),
        1 => (0usize..12).prop_map(Op::LowWater),
        1 => Just(Op::Clear),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Deque,
    Transit(u64),
    Handed,
    Forgotten,
    Released,
}

struct Model {
    it: Dispatcher,
    config: DequeConfig,
    now: Instant,
    made: u64,
    place: BTreeMap<JobId, (Place, FencingToken)>,
    inserts: Vec<Vec<(Arc<JobSpec>, Plan)>>,
    offers: Vec<(Owner, u64)>,
    retakes: Vec<(u64, Vec<Claim>)>,
    lent: usize,
    readopted: usize,
    low_water: usize,
    armed: bool,
}

fn thief(n: u8) -> Owner {
    owner(["t", "u", "v"][usize::from(n) % 3])
}

impl Model {
    fn new(capacity: usize) -> Self {
        let config = DequeConfig { capacity, max_steal_batch: 4, ..DequeConfig::default() };
        let mut this = Self {
            it: Dispatcher::new(node("a"), config),
            config,
            now: Instant::ZERO,
            made: 0,
            place: BTreeMap::new(),
            inserts: Vec::new(),
            offers: Vec::new(),
            retakes: Vec::new(),
            lent: 0,
            readopted: 0,
            low_water: 0,
            armed: true,
        };
        this.follow();
        this
    }

    fn spec(&mut self, priority: i16) -> JobSpec {
        self.made += 1;
        JobSpec { priority, pinned: self.made.is_multiple_of(5), ..spec(self.made) }
    }

    fn jobs(&mut self, n: usize) -> Vec<(crate::job::ClaimedJob, bool)> {
        (0..n)
            .map(|i| {
                let job = claimed(self.spec(0), 1);
                self.place.insert(job.spec.id, (Place::Deque, job.token));
                (job, i.is_multiple_of(2))
            })
            .collect()
    }

    fn count(&self, is: impl Fn(Place) -> bool) -> usize {
        self.place.values().filter(|(place, _)| is(*place)).count()
    }

    fn queued(&self) -> usize {
        self.count(|place| place == Place::Deque)
    }

    fn in_transit(&self) -> usize {
        self.count(|place| matches!(place, Place::Transit(_)))
    }

    /// The offer ends: the jobs in `back` are queued again, the others gone.
    fn end_offer(&mut self, offer: u64, back: impl Fn(&JobId) -> Option<FencingToken>) {
        for (job, (place, token)) in &mut self.place {
            if *place == Place::Transit(offer) {
                match back(job) {
                    Some(now) => (*place, *token) = (Place::Deque, now),
                    None => *place = Place::Forgotten,
                }
            }
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Plan(priorities) => {
                let jobs: Vec<_> = priorities.into_iter().map(|p| Arc::new(self.spec(p))).collect();
                let free = self.free();
                let plans = self.it.plan_insert(&jobs, |job| job.origin.clone(), 0);
                assert!(plans.iter().filter(|plan| plan.claim).count() <= free);
                self.inserts.push(jobs.into_iter().zip(plans).collect());
            }
            Op::Inserted(outcomes) if !self.inserts.is_empty() => {
                let mut inserted = Vec::new();
                for ((job, plan), outcome) in self.inserts.remove(0).into_iter().zip(outcomes) {
                    let token = FencingToken(1);
                    let outcome = match outcome {
                        0 => InsertOutcome::Failed,
                        1 => InsertOutcome::Duplicate,
                        _ if plan.claim => InsertOutcome::Claimed(token),
                        _ => InsertOutcome::Unclaimed,
                    };
                    if outcome == InsertOutcome::Claimed(token) {
                        self.place.insert(job.id, (Place::Deque, token));
                    }
                    inserted.push((job, plan, outcome));
                }
                self.it.handle_inserted(self.now, inserted);
            }
            Op::Found(found, back) => {
                let found = found.min(self.lent);
                let back = back.min(self.lent - found);
                self.lent -= found + back;
                self.armed |= found > 0;
                let jobs = self.jobs(found);
                self.it.push_sorted(self.now, jobs, Source::Stolen);
                self.follow();
                self.it.handle_room_back(back);
            }
            Op::Readopt(n) => {
                let jobs = self.jobs(n);
                self.readopted += n;
                self.it.push_sorted(self.now, jobs, Source::Readopted);
            }
            Op::Lend => {
                let room = self.it.lend();
                assert!(room == 0 || self.is_low());
                self.armed |= room == 0 && self.is_low();
                self.lent += room;
            }
            Op::Credit(n) => self.it.credit(self.now, n),
            Op::Surrender(n, max) => {
                let stealable = self.it.stealable();
                let plan = self.it.surrender(self.now, &thief(n), max);
                assert_eq!(plan.jobs.len(), stealable.div_ceil(2).min(max).min(4));
                for job in &plan.jobs {
                    let was =
                        self.place.insert(job.spec.id, (Place::Transit(plan.offer), job.token));
                    assert_eq!(was, Some((Place::Deque, job.token)));
                    assert!(!job.spec.pinned);
                }
                if plan.offer != 0 {
                    self.offers.push((thief(n), plan.offer));
                }
            }
            Op::Settle(which, own, taken) if !self.offers.is_empty() => {
                let (thief, offer) = self.offers[which % self.offers.len()].clone();
                let retaking = self.retakes.iter().any(|(retake, _)| *retake == offer);
                let by = if own { thief } else { owner("x") };
                let ids = self.transit_of(offer);
                let taken: Vec<JobId> = pick(&ids, taken).collect();
                if own && !retaking {
                    let tokens = self.place.clone();
                    self.end_offer(offer, |id| (!taken.contains(id)).then(|| tokens[id].1));
                }
                self.it.settle(self.now, &by, offer, &taken);
            }
            Op::Wait(ms) => {
                self.now = self.now + Duration::from_millis(ms);
                self.it.handle_timeout(self.now);
            }
            Op::Retaken(held) if !self.retakes.is_empty() => {
                let (offer, claims) = self.retakes.remove(0);
                let Some(held) = held else {
                    self.it.handle_retaken(self.now, offer, None);
                    return;
                };
                let held: Vec<Claim> = pick(&claims, held)
                    .map(|claim| Claim { token: claim.token.next(), ..claim })
                    .collect();
                self.end_offer(offer, |id| {
                    held.iter().find(|claim| claim.job == *id).map(|claim| claim.token)
                });
                self.it.handle_retaken(self.now, offer, Some(&held));
            }
            Op::LowWater(jobs) => {
                self.low_water = jobs;
                self.it.set_low_water(jobs);
            }
            Op::Clear => {
                let held = self.queued() + self.in_transit();
                for (place, _) in self.place.values_mut() {
                    if matches!(place, Place::Deque | Place::Transit(_)) {
                        *place = Place::Forgotten;
                    }
                }
                // What was planned under the lost lease is answered, and not run.
                self.armed = true;
                assert_eq!(self.it.clear(), held);
                self.follow();
                for insert in std::mem::take(&mut self.inserts) {
                    let claimed = InsertOutcome::Claimed(FencingToken(1));
                    let all = insert.into_iter().map(|(job, plan)| (job, plan, claimed));
                    self.it.handle_inserted(self.now, all.collect());
                }
            }
            Op::Inserted(_) | Op::Settle(..) | Op::Retaken(_) => {}
        }
    }

    fn transit_of(&self, offer: u64) -> Vec<JobId> {
        let of = |place: Place| place == Place::Transit(offer);
        self.place.iter().filter(|(_, (place, _))| of(*place)).map(|(id, _)| *id).collect()
    }

    fn free(&self) -> usize {
        let taken = self.queued() + self.in_transit() + self.it.reserved() + self.lent;
        self.config.capacity.saturating_sub(taken)
    }

    fn is_low(&self) -> bool {
        let mark = self.low_water.min(self.config.capacity / 2).max(self.config.steal_threshold);
        self.queued() <= mark
    }

    fn follow(&mut self) {
        while let Some(effect) = self.it.poll_effect() {
            match effect {
                Effect::Run { entry, .. } => {
                    let held = (Place::Deque, entry.job.token);
                    let was = self.place.insert(entry.job.spec.id, (Place::Handed, held.1));
                    assert_eq!(was, Some(held), "run by a token that is not held");
                }
                Effect::Idle { room } => {
                    assert!(self.armed, "idle twice on one edge");
                    self.armed = false;
                    self.lent += room;
                }
                Effect::Retake { offer, claims } => self.retakes.push((offer, claims)),
                Effect::Release { claims } => {
                    for claim in claims {
                        let was = self.place.insert(claim.job, (Place::Released, claim.token));
                        assert_eq!(was, Some((Place::Deque, claim.token)));
                    }
                }
                Effect::Hint { stealable, .. } => assert!(stealable > 0),
                Effect::Nudge { node } => panic!("all jobs are this node's, not {node}'s"),
                Effect::NudgeSelf => {}
            }
        }
        self.armed |= !self.is_low();
    }

    fn check(&self) {
        let reserved: usize = self.inserts.iter().flatten().filter(|(_, plan)| plan.claim).count();
        assert_eq!(self.it.queued(), self.queued());
        assert_eq!(self.it.in_transit(), self.in_transit());
        assert_eq!((self.it.reserved(), self.it.lent()), (reserved, self.lent));
        for (job, (place, _)) in &self.place {
            let here = matches!(place, Place::Deque | Place::Transit(_));
            assert_eq!(self.it.knows(job), here, "{job} is {place:?}");
        }
        let taken = self.queued() + self.in_transit() + reserved + self.lent;
        assert!(taken <= self.config.capacity + self.readopted, "{taken} places are taken");
        assert!(self.it.credits() == 0 || self.queued() == 0, "a job waits beside a credit");
        assert!(!(self.armed && self.is_low() && self.free() > 0), "an idle edge was lost");
    }
}

fn pick<T: Copy>(from: &[T], bits: u8) -> impl Iterator<Item = T> {
    from.iter().enumerate().filter(move |(i, _)| bits >> (i % 8) & 1 == 1).map(|(_, x)| *x)
}

proptest! {
    #[test]
    fn every_job_is_in_one_place_and_no_room_is_lost(
        ops in prop::collection::vec(op(), 1..120),
        capacity in 1usize..20,
    ) {
        let mut model = Model::new(capacity);
        model.check();
        for op in ops {
            model.step(op);
            model.follow();
            model.check();
        }
        for claim in model.it.close() {
            let was = model.place.insert(claim.job, (Place::Released, claim.token));
            prop_assert_eq!(was, Some((Place::Deque, claim.token)));
        }
        for (thief, offer) in model.offers.clone() {
            if !model.retakes.iter().any(|(retake, _)| *retake == offer) {
                let tokens = model.place.clone();
                model.end_offer(offer, |id| Some(tokens[id].1));
            }
            model.it.settle(model.now, &thief, offer, &[]);
        }
        model.it.credit(model.now, 100);
        model.follow();
        prop_assert_eq!(model.queued(), 0, "all that came back after the close is released");
    }
}
