//! The order of the deque: who runs next, and what a thief gets.
//!
//! A priority is a deque of its own. Its front holds the jobs that other nodes would run as well as
//! this one (non-owned), its back those whose key this node owns (hot); within both, by the time
//! they came to this node. [`Deque::pop`] takes, in this order of precedence:
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

/// Within a class: priority, then age, then order of arrival.
type Place = (Reverse<i16>, Instant, u64);

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
    by_age: BTreeMap<(Instant, u64), Slot>,
    by_id: HashMap<JobId, Slot>,
    next_seq: u64,
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
            next_seq: 0,
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

    /// Adds jobs; of those with the same `queued_at`, the first given counts as the oldest. Of two
    /// claims to one job the greater token stays.
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
        let seq = self.next_seq;
        self.next_seq += 1;
        let place = (Reverse(entry.job.spec.priority), entry.queued_at, seq);
        let slot = Slot { class: class_of(&entry), place };
        self.by_age.insert((entry.queued_at, seq), slot);
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
        if now.saturating_since(oldest.place.1) >= self.front_age_max {
            return Some(self.remove(oldest));
        }
        let last = (level, Instant::FAR_FUTURE, u64::MAX);
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
        self.by_age.remove(&(slot.place.1, slot.place.2));
        self.by_id.remove(&entry.job.spec.id);
        entry
    }
}

fn age(slot: &Slot) -> (Instant, u64) {
    (slot.place.1, slot.place.2)
}
