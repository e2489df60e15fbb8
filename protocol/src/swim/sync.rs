//! When to exchange full state, and with whom: seeds, random members, and the dead, who may only
//! have been cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::NodeId;
use crate::limits::SEEDS_MAX;
use crate::swim::SwimConfig;
use crate::swim::suspicion::jittered;
use crate::time::Instant;

/// The exchanges of a young node come after so many periods, each about twice the last: nodes that
/// join at the same moment through one seed each got only those who were before them.
const YOUNG_SYNCS: [u32; 4] = [1, 2, 4, 8];

/// Periods from a death to the first attempt to reach the dead.
const FIRST_REDIAL: u32 = 10;

/// `base` doubled `failures` times, up to `max`.
fn backoff(base: Duration, failures: u32, max: Duration) -> Duration {
    base.saturating_mul(1 << failures.min(16)).min(max)
}

/// When to exchange state with a random member.
#[derive(Debug)]
pub(crate) struct Syncs {
    period: Duration,
    interval: Duration,
    done: usize,
    at: Option<Instant>,
}

impl Syncs {
    pub(crate) fn new(config: &SwimConfig) -> Self {
        let (period, interval) = (config.protocol_period, config.sync_interval);
        Self { period, interval, done: 0, at: None }
    }

    /// Begins again as a young node.
    pub(crate) fn restart(&mut self, now: Instant, rng: &mut fastrand::Rng) {
        self.done = 0;
        self.schedule(now, rng);
    }

    fn schedule(&mut self, now: Instant, rng: &mut fastrand::Rng) {
        let pause = match YOUNG_SYNCS.get(self.done) {
            Some(periods) => (self.period * *periods).min(self.interval),
            None => self.interval,
        };
        self.at = Some(now + jittered(rng, pause));
    }

    pub(crate) fn is_young(&self) -> bool {
        self.done < YOUNG_SYNCS.len()
    }

    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.at
    }

    /// Whether an exchange is due by `now`; the next is then scheduled.
    pub(crate) fn take_due(&mut self, now: Instant, rng: &mut fastrand::Rng) -> bool {
        if self.at.is_none_or(|at| at > now) {
            return false;
        }
        self.done = self.done.saturating_add(1);
        self.schedule(now, rng);
        true
    }
}

/// The seeds, each dialled until it answers, and again when whoever answered is gone.
#[derive(Debug)]
pub(crate) struct Seeds {
    period: Duration,
    idle: Duration,
    backoff_max: Duration,
    seeds: Vec<Seed>,
}

#[derive(Debug)]
struct Seed {
    name: String,
    /// When to dial it; `None` while it is being dialled.
    at: Option<Instant>,
    failures: u32,
    answered: Option<NodeId>,
}

impl Seeds {
    pub(crate) fn new(config: &SwimConfig) -> Self {
        Self {
            period: config.protocol_period,
            idle: config.sync_interval,
            backoff_max: config.redial_interval_max,
            seeds: Vec::new(),
        }
    }

    /// Adds seeds, each to be dialled at once; returns how many were over the bound.
    pub(crate) fn add(&mut self, now: Instant, names: Vec<String>) -> usize {
        let mut refused = 0;
        for name in names {
            if self.seeds.iter().any(|seed| seed.name == name) {
                continue;
            }
            if self.seeds.len() == SEEDS_MAX {
                refused += 1;
            } else {
                self.seeds.push(Seed { name, at: Some(now), failures: 0, answered: None });
            }
        }
        refused
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.seeds.is_empty()
    }

    /// Dials every seed again, now: this node has a new generation to announce.
    pub(crate) fn restart(&mut self, now: Instant) {
        for seed in &mut self.seeds {
            seed.at = Some(now);
            seed.answered = None;
        }
    }

    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.seeds.iter().filter_map(|seed| seed.at).min()
    }

    /// A seed to dial by `now`: its index and name. Seeds whose answerer is still `present` are put
    /// off.
    pub(crate) fn take_due(
        &mut self,
        now: Instant,
        present: impl Fn(&NodeId) -> bool,
    ) -> Option<(usize, String)> {
        for (index, seed) in self.seeds.iter_mut().enumerate() {
            if seed.at.is_none_or(|at| at > now) {
                continue;
            }
            if seed.answered.as_ref().is_some_and(&present) {
                seed.at = Some(now + self.idle);
            } else {
                seed.at = None;
                return Some((index, seed.name.clone()));
            }
        }
        None
    }

    /// The seed answered, in the person of `by`.
    pub(crate) fn answered(
        &mut self,
        now: Instant,
        rng: &mut fastrand::Rng,
        index: usize,
        by: NodeId,
    ) {
        let seed = &mut self.seeds[index];
        seed.failures = 0;
        seed.answered = Some(by);
        seed.at = Some(now + jittered(rng, self.idle));
    }

    /// The seed did not answer; returns its name at the first failure of an outage.
    pub(crate) fn failed(
        &mut self,
        now: Instant,
        rng: &mut fastrand::Rng,
        index: usize,
    ) -> Option<String> {
        let seed = &mut self.seeds[index];
        let pause = backoff(self.period, seed.failures, self.backoff_max);
        seed.at = Some(now + jittered(rng, pause));
        seed.answered = None;
        seed.failures = seed.failures.saturating_add(1);
        (seed.failures == 1).then(|| seed.name.clone())
    }

    /// Whoever answered for a seed may be gone: look soon.
    pub(crate) fn gone(&mut self, now: Instant, rng: &mut fastrand::Rng, id: &NodeId) {
        for seed in &mut self.seeds {
            if seed.answered.as_ref() == Some(id) && seed.at.is_some() {
                seed.at = Some(now + jittered(rng, self.period * FIRST_REDIAL));
            }
        }
    }
}

/// The dead, each redialled with a growing pause for as long as it is remembered, so that the
/// halves of a healed partition find each other. Never those who left.
#[derive(Debug)]
pub(crate) struct Redials {
    period: Duration,
    pause_max: Duration,
    by_id: BTreeMap<NodeId, (Option<Instant>, u32)>,
    by_time: BTreeSet<(Instant, NodeId)>,
    /// Not before this: one attempt a period, however many are dead.
    free_at: Instant,
}

impl Redials {
    pub(crate) fn new(config: &SwimConfig) -> Self {
        Self {
            period: config.protocol_period,
            pause_max: config.redial_interval_max,
            by_id: BTreeMap::new(),
            by_time: BTreeSet::new(),
            free_at: Instant::ZERO,
        }
    }

    /// Remembers `id` as dead. Known to be dead for long (`stale`), it is not tried soon.
    pub(crate) fn add(&mut self, now: Instant, rng: &mut fastrand::Rng, id: &NodeId, stale: bool) {
        if self.by_id.contains_key(id) {
            return;
        }
        let pause = (self.period * FIRST_REDIAL).min(self.pause_max);
        let pause = if stale { self.pause_max } else { pause };
        self.set(id.clone(), Some(now + jittered(rng, pause)), 0);
    }

    pub(crate) fn remove(&mut self, id: &NodeId) {
        if let Some((Some(at), _)) = self.by_id.remove(id) {
            self.by_time.remove(&(at, id.clone()));
        }
    }

    fn set(&mut self, id: NodeId, at: Option<Instant>, failures: u32) {
        self.remove(&id);
        if let Some(at) = at {
            self.by_time.insert((at, id.clone()));
        }
        self.by_id.insert(id, (at, failures));
    }

    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| (*at).max(self.free_at))
    }

    /// The dead member to dial by `now`, if one is due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<NodeId> {
        if self.next_at().is_none_or(|at| at > now) {
            return None;
        }
        let (_, id) = self.by_time.first().cloned()?;
        let failures = self.by_id.get(&id).map_or(0, |(_, failures)| *failures);
        self.set(id.clone(), None, failures);
        self.free_at = now + self.period;
        Some(id)
    }

    /// The attempt came to nothing, or to something that did not bring it back yet.
    pub(crate) fn failed(&mut self, now: Instant, rng: &mut fastrand::Rng, id: &NodeId) {
        if let Some((None, failures)) = self.by_id.get(id).copied() {
            let pause = backoff(self.period * FIRST_REDIAL, failures + 1, self.pause_max);
            let at = now + jittered(rng, pause);
            self.set(id.clone(), Some(at), failures.saturating_add(1));
        }
    }
}
