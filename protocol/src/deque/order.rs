//! The order of the deque: who runs next, and what a thief gets.
//!
//! A priority is a deque of its own. Its front holds the jobs that other nodes would run as well as
//! this one (non-owned), its back those whose key this node owns (hot); within both, by age: when
//! they came to this node, then by their ids, which sort by when they were made. [`Deque::pop`]
//! takes, in this order of precedence:
//!
//! 1. at every `front_every`-th pop the oldest job of all, whatever its priority: so no job waits for
//!    ever, a job with n older ones is popped within `front_every` x (n + 1) pops;
//! 2. of the highest priority the oldest job, once it waits for `front_age_max`: a level that does
//!    not keep up is worked off first in, first out;
//! 3. of the highest priority the newest owned job, else the newest: keys stay warm.
//!
//! Apart from 1, a job never runs before one of a higher priority. [`Deque::steal`] takes non-owned
//! jobs before owned ones, and within each the one that the mesh should run next: highest priority,
//! then oldest. Pinned jobs are never stolen.
//!
//! Every operation costs a logarithm of the length.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::id::JobId;
use crate::job::ClaimedJob;
use crate::time::Instant;

/// A job in the deque.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The job, and the right to run it.
    pub job: ClaimedJob,
    /// Whether its key, or without one its acceptance, places it on this node.
    pub owned: bool,
    /// When it came to this node. A job that was offered and comes back keeps it.
    pub queued_at: Instant,
    /// Whether it was taken from another node.
    pub stolen: bool,
}

/// When a job came to this node, then its id, which sorts by when it was made. A job that comes back
/// from a thief has its old place again.
type Age = (Instant, JobId);

/// Within a class: priority, then age.
type Place = (Reverse<i16>, Age);

/// Jobs that are owned or not, and may be stolen or not. Kept apart so that neither an owner's pop
/// nor a theft ever steps over jobs that are not for it.
const CLASSES: usize = 4;
const OWNED: usize = 1;
const PINNED: usize = 2;

fn class_of(entry: &Entry) -> usize {
    usize::from(entry.owned) * OWNED + usize::from(entry.job.spec.pinned) * PINNED
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    class: usize,
    place: Place,
}

/// Claimed jobs in the order described in the module. Unbounded: its keeper has the bound.
#[derive(Clone, Debug)]
pub struct Deque {
    front_every: u32,
    front_age_max: Duration,
    classes: [BTreeMap<Place, Entry>; CLASSES],
    by_age: BTreeMap<Age, Slot>,
    by_id: HashMap<JobId, Slot>,
    pops_since_front: u32,
}

impl Deque {
    /// An empty deque. Every `front_every`-th pop takes the oldest job of all (0: none does, and low
    /// priorities may wait for ever); a job that is `front_age_max` old is the next of its priority.
    pub fn new(front_every: u32, front_age_max: Duration) -> Self {
        Self {
            front_every,
            front_age_max,
            classes: Default::default(),
            by_age: BTreeMap::new(),
            by_id: HashMap::new(),
            pops_since_front: 0,
        }
    }

    /// Jobs in it.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Jobs that a thief could get.
    pub fn stealable(&self) -> usize {
        self.classes[0].len() + self.classes[OWNED].len()
    }

    /// Whether the job is in it.
    pub fn contains(&self, job: &JobId) -> bool {
        self.by_id.contains_key(job)
    }

    /// When the oldest job came.
    pub fn oldest(&self) -> Option<Instant> {
        self.by_age.keys().next().map(|&(queued_at, _)| queued_at)
    }

    /// Adds jobs. Of two claims to one job the greater token stays.
    pub fn push_sorted(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            self.push(entry);
        }
    }

    fn push(&mut self, entry: Entry) {
        if let Some(&held) = self.by_id.get(&entry.job.spec.id) {
            if self.classes[held.class][&held.place].job.token >= entry.job.token {
                return;
            }
            self.remove(held);
        }
        let age = (entry.queued_at, entry.job.spec.id);
        let place = (Reverse(entry.job.spec.priority), age);
        let slot = Slot { class: class_of(&entry), place };
        self.by_age.insert(age, slot);
        self.by_id.insert(entry.job.spec.id, slot);
        self.classes[slot.class].insert(place, entry);
    }

    /// Takes the job that this node should run next.
    pub fn pop(&mut self, now: Instant) -> Option<Entry> {
        let level = self.classes.iter().filter_map(|c| c.keys().next()).map(|p| p.0).min()?;
        self.pops_since_front = self.pops_since_front.saturating_add(1);
        if self.front_every != 0 && self.pops_since_front >= self.front_every {
            self.pops_since_front = 0;
            let (_, &oldest) = self.by_age.first_key_value()?;
            return Some(self.remove(oldest));
        }
        let oldest = self.ends(level, 0..CLASSES, |class| class.keys().next()).min_by_key(age)?;
        if now.saturating_since(oldest.place.1.0) >= self.front_age_max {
            return Some(self.remove(oldest));
        }
        let last = (level, (Instant::FAR_FUTURE, JobId::from_bytes([u8::MAX; 16])));
        let newest = |class: &'static [usize]| {
            self.ends(level, class.iter().copied(), move |jobs| {
                jobs.range(..=last).next_back().map(|(place, _)| place)
            })
            .max_by_key(age)
        };
        let hot = newest(&[OWNED, OWNED + PINNED]).or_else(|| newest(&[0, PINNED]))?;
        Some(self.remove(hot))
    }

    /// The slot that `end` finds in each of `classes`, of those that are at `level`.
    fn ends<'a>(
        &'a self,
        level: Reverse<i16>,
        classes: impl Iterator<Item = usize> + 'a,
        end: impl Fn(&'a BTreeMap<Place, Entry>) -> Option<&'a Place> + 'a,
    ) -> impl Iterator<Item = Slot> + 'a {
        classes
            .filter_map(move |class| end(&self.classes[class]).map(|&place| Slot { class, place }))
            .filter(move |slot| slot.place.0 == level)
    }

    /// Takes up to `max` jobs for a thief.
    pub fn steal(&mut self, max: usize) -> Vec<Entry> {
        let mut stolen = Vec::with_capacity(max.min(self.stealable()));
        for class in [0, OWNED] {
            while stolen.len() < max {
                let Some((&place, _)) = self.classes[class].first_key_value() else { break };
                stolen.push(self.remove(Slot { class, place }));
            }
        }
        stolen
    }

    /// Takes everything, oldest first.
    pub fn drain(&mut self) -> Vec<Entry> {
        let slots: Vec<Slot> = self.by_age.values().copied().collect();
        slots.into_iter().map(|slot| self.remove(slot)).collect()
    }

    fn remove(&mut self, slot: Slot) -> Entry {
        let entry = self.classes[slot.class].remove(&slot.place).expect("indexes agree");
        self.by_age.remove(&slot.place.1);
        self.by_id.remove(&entry.job.spec.id);
        entry
    }
}

fn age(slot: &Slot) -> Age {
    slot.place.1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fixtures::{at_ms, claimed, entry, numbers, spec};
    use super::*;

    const NEVER: Duration = Duration::MAX;

    fn ids(entries: &[Entry]) -> Vec<u64> {
        numbers(entries.iter().map(|entry| &entry.job.spec.id))
    }

    fn with_priority(n: u64, owned: bool, queued_ms: u64, priority: i16) -> Entry {
        let job = claimed(crate::job::JobSpec { priority, ..spec(n) }, 1);
        Entry { job, ..entry(n, owned, queued_ms) }
    }

    fn popped(deque: &mut Deque, now: Instant) -> Vec<u64> {
        let entries: Vec<Entry> = std::iter::from_fn(|| deque.pop(now)).collect();
        ids(&entries)
    }

    #[test]
    fn the_owner_pops_owned_jobs_before_others_and_the_newest_first() {
        let mut deque = Deque::new(0, NEVER);
        deque.push_sorted(vec![entry(1, true, 10), entry(2, false, 10), entry(3, true, 10)]);
        deque.push_sorted(vec![entry(4, false, 20)]);
        assert_eq!(popped(&mut deque, at_ms(20)), [3, 1, 4, 2]);
    }

    #[test]
    fn a_higher_priority_is_popped_before_a_hotter_job() {
        let mut deque = Deque::new(0, NEVER);
        deque.push_sorted(vec![
            with_priority(1, true, 10, 0),
            with_priority(2, false, 10, 5),
            with_priority(3, true, 10, -5),
            with_priority(4, false, 10, 5),
        ]);
        assert_eq!(popped(&mut deque, at_ms(10)), [4, 2, 1, 3]);
    }

    #[test]
    fn a_job_past_the_age_bound_is_the_next_of_its_priority() {
        let mut deque = Deque::new(0, Duration::from_secs(1));
        deque.push_sorted(vec![entry(1, false, 0), with_priority(9, false, 0, -1)]);
        deque.push_sorted(vec![entry(2, true, 500), entry(3, true, 900)]);
        assert_eq!(ids(&[deque.pop(at_ms(999)).unwrap()]), [3], "nothing is old yet");
        assert_eq!(ids(&[deque.pop(at_ms(1_000)).unwrap()]), [1], "the old one, though not owned");
        assert_eq!(popped(&mut deque, at_ms(1_500)), [2, 9], "age never overtakes a priority");
    }

    #[test]
    fn every_kth_pop_takes_the_oldest_job_whatever_its_priority() {
        let mut deque = Deque::new(3, NEVER);
        deque.push_sorted(vec![with_priority(1, false, 0, -9)]);
        deque.push_sorted((2..8).map(|n| entry(n, true, n)).collect());
        assert_eq!(popped(&mut deque, at_ms(10)), [7, 6, 1, 5, 4, 2, 3]);
    }

    #[test]
    fn a_thief_gets_others_jobs_first_then_the_highest_priority_then_the_oldest() {
        let mut deque = Deque::new(0, NEVER);
        let pinned = claimed(crate::job::JobSpec { pinned: true, priority: 9, ..spec(7) }, 1);
        deque.push_sorted(vec![
            entry(1, true, 0),
            entry(2, false, 20),
            entry(3, false, 10),
            with_priority(4, true, 30, 1),
            with_priority(5, false, 30, 1),
            Entry { job: pinned, ..entry(7, false, 0) },
        ]);
        assert_eq!(deque.stealable(), 5);
        assert_eq!(ids(&deque.steal(2)), [5, 3]);
        assert_eq!(ids(&deque.steal(9)), [2, 4, 1]);
        assert_eq!((deque.stealable(), deque.len()), (0, 1), "a pinned job stays");
        assert_eq!(ids(&deque.drain()), [7]);
    }

    #[test]
    fn of_two_claims_to_a_job_the_greater_token_stays() {
        let mut deque = Deque::new(0, NEVER);
        for token in [2, 3, 1] {
            deque.push_sorted(vec![Entry { job: claimed(spec(1), token), ..entry(1, true, 0) }]);
        }
        let only = deque.drain();
        assert_eq!((only.len(), only[0].job.token.0), (1, 3));
        assert!(deque.is_empty() && deque.oldest().is_none() && deque.pop(at_ms(9)).is_none());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(Vec<(bool, bool, i16)>),
        Pop,
        Steal(usize),
        Wait(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let job = (any::<bool>(), prop::bool::weighted(0.2), -1i16..2);
        prop_oneof![
            3 => prop::collection::vec(job, 0..6).prop_map(Op::Push),
            6 => Just(Op::Pop),
            2 => (0usize..5).prop_map(Op::Steal),
            2 => (0u64..700).prop_map(Op::Wait),
        ]
    }

    /// The rules of the module's text, by sorting everything each time.
    #[derive(Default)]
    struct Naive {
        jobs: Vec<Entry>,
        pops: u32,
    }

    impl Naive {
        fn pop(&mut self, now: Instant, k: u32, age_max: Duration) -> Option<Entry> {
            self.pops += u32::from(!self.jobs.is_empty());
            let oldest = |jobs: &[Entry], level: Option<i16>| {
                (0..jobs.len())
                    .filter(|&i| level.is_none_or(|p| jobs[i].job.spec.priority == p))
                    .min_by_key(|&i| (jobs[i].queued_at, jobs[i].job.spec.id))
            };
            let level = self.jobs.iter().map(|e| e.job.spec.priority).max()?;
            let mut choice = oldest(&self.jobs, Some(level))?;
            if self.pops == k {
                self.pops = 0;
                choice = oldest(&self.jobs, None)?;
            } else if now.saturating_since(self.jobs[choice].queued_at) < age_max {
                choice = (0..self.jobs.len())
                    .filter(|&i| self.jobs[i].job.spec.priority == level)
                    .max_by_key(|&i| {
                        let e = &self.jobs[i];
                        (e.owned, e.queued_at, e.job.spec.id)
                    })?;
            }
            Some(self.jobs.remove(choice))
        }

        fn steal(&mut self, max: usize) -> Vec<Entry> {
            let mut stolen = Vec::new();
            while stolen.len() < max {
                let next = (0..self.jobs.len())
                    .filter(|&i| !self.jobs[i].job.spec.pinned)
                    .min_by_key(|&i| {
                        let e = &self.jobs[i];
                        (e.owned, Reverse(e.job.spec.priority), e.queued_at, e.job.spec.id)
                    });
                let Some(next) = next else { break };
                stolen.push(self.jobs.remove(next));
            }
            stolen
        }
    }

    proptest! {
        #[test]
        fn it_does_what_sorting_everything_each_time_would(
            ops in prop::collection::vec(op(), 1..60),
            k in 2u32..6,
        ) {
            let age_max = Duration::from_secs(1);
            let (mut deque, mut naive) = (Deque::new(k, age_max), Naive::default());
            let (mut now, mut made) = (Instant::ZERO, 0);
            for op in ops {
                match op {
                    Op::Push(jobs) => {
                        let entries: Vec<Entry> = jobs.into_iter().map(|(owned, pinned, priority)| {
                            made += 1;
                            let spec = crate::job::JobSpec { pinned, priority, ..spec(made) };
                            Entry { job: claimed(spec, 1), owned, queued_at: now, stolen: false }
                        }).collect();
                        naive.jobs.extend(entries.iter().cloned());
                        deque.push_sorted(entries);
                    }
                    Op::Pop => prop_assert_eq!(deque.pop(now), naive.pop(now, k, age_max)),
                    Op::Steal(max) => prop_assert_eq!(deque.steal(max), naive.steal(max)),
                    Op::Wait(ms) => now = now + Duration::from_millis(ms),
                }
                let stealable = naive.jobs.iter().filter(|e| !e.job.spec.pinned).count();
                prop_assert_eq!((deque.len(), deque.stealable()), (naive.jobs.len(), stealable));
                prop_assert_eq!(deque.oldest(), naive.jobs.iter().map(|e| e.queued_at).min());
            }
        }

        /// The flood that starves: at each pop a newer, hotter job of a higher priority arrives.
        #[test]
        fn no_job_waits_for_ever(older in 0u64..20, k in 1u32..10) {
            let mut deque = Deque::new(k, NEVER);
            deque.push_sorted((0..older).map(|n| entry(n, true, n)).collect());
            deque.push_sorted(vec![with_priority(1_000, false, 1_000, i16::MIN)]);
            let mut pops = 0;
            for n in 1_001.. {
                deque.push_sorted(vec![with_priority(n, true, n, i16::MAX)]);
                pops += 1;
                if ids(&[deque.pop(at_ms(n)).unwrap()]) == [1_000] {
                    break;
                }
            }
            prop_assert_eq!(pops, u64::from(k) * (older + 1));
        }
    }
}
