//! What a thief knows of the other members: who lives, what they would give, how far they are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::lifeline::lifelines_of;
use super::victim::Prospect;
use crate::id::NodeId;
use crate::limits::{MEMBERS_MAX, STEAL_BACKOFF, STEAL_BACKOFF_MAX};
use crate::load::{Load, LoadReport};
use crate::swim::{Member, MemberState, MembershipEvent};
use crate::time::{Instant, micros};

#[derive(Clone, Debug)]
struct Peer {
    member: Member,
    /// What it said last of its load, in this boot.
    load: Option<Load>,
    /// What it would give: by its load, or by what it said to this node since.
    stealable: u32,
    round_trip: Option<Duration>,
    /// Whether its last answer was empty: it remembers this node.
    registered: bool,
}

#[derive(Clone, Copy, Debug)]
struct Avoided {
    until: Instant,
    failures: u32,
}

/// The present members but for this node; at most [`MEMBERS_MAX`].
#[derive(Clone, Debug)]
pub(super) struct Peers {
    me: NodeId,
    known: BTreeMap<NodeId, Peer>,
    avoided: BTreeMap<NodeId, Avoided>,
    lifelines: Vec<NodeId>,
    transfer_time: Duration,
    own: Load,
}

impl Peers {
    pub(super) fn new(me: NodeId) -> Self {
        Self {
            me,
            known: BTreeMap::new(),
            avoided: BTreeMap::new(),
            lifelines: Vec::new(),
            transfer_time: Duration::ZERO,
            own: Load::default(),
        }
    }

    /// How busy this node is.
    pub(super) fn set_own(&mut self, own: Load) {
        self.own = own;
    }

    /// Takes in an event; returns the members whose boot has ended.
    pub(super) fn apply(&mut self, event: &MembershipEvent) -> Vec<NodeId> {
        let mut ended = Vec::new();
        if let MembershipEvent::Snapshot { members, .. } = event {
            let present: BTreeSet<&NodeId> =
                members.iter().filter(|m| m.is_present()).map(|m| &m.id).collect();
            ended.extend(self.known.keys().filter(|id| !present.contains(id)).cloned());
            for id in &ended {
                self.remove(id);
            }
            for member in members.iter() {
                self.upsert(member, &mut ended);
            }
        } else if let Some(member) = event.member() {
            self.upsert(member, &mut ended);
        }
        let alive = self.known.values().filter(|p| p.member.state == MemberState::Alive);
        let mut ids: Vec<NodeId> = alive.map(|peer| peer.member.id.clone()).collect();
        let here = ids.partition_point(|id| *id < self.me);
        ids.insert(here, self.me.clone());
        self.lifelines = lifelines_of(here, &ids);
        ended
    }

    fn upsert(&mut self, member: &Member, ended: &mut Vec<NodeId>) {
        if member.id == self.me {
            return;
        }
        if let Some(peer) = self.known.get_mut(&member.id) {
            if member.is_present() && peer.member.generation == member.generation {
                peer.member = member.clone();
                return;
            }
            self.remove(&member.id);
            ended.push(member.id.clone());
        }
        if member.is_present() && self.known.len() < MEMBERS_MAX {
            let peer = Peer {
                member: member.clone(),
                load: None,
                stealable: 0,
                round_trip: None,
                registered: false,
            };
            self.known.insert(member.id.clone(), peer);
        }
    }

    fn remove(&mut self, id: &NodeId) {
        self.known.remove(id);
        self.avoided.remove(id);
    }

    pub(super) fn member(&self, id: &NodeId) -> Option<&Member> {
        self.known.get(id).map(|peer| &peer.member)
    }

    /// Takes in a load of a boot that is known; returns whether it was news.
    pub(super) fn observe(&mut self, report: &LoadReport) -> bool {
        let Some(peer) = self.known.get_mut(&report.node) else { return false };
        if peer.member.generation != report.generation
            || peer.load.is_some_and(|known| known.version >= report.load.version)
        {
            return false;
        }
        peer.load = Some(report.load);
        peer.stealable = report.load.stealable;
        true
    }

    /// `from` says that it would give so many jobs.
    pub(super) fn hinted(&mut self, from: &NodeId, stealable: u32) {
        if let Some(peer) = self.known.get_mut(from) {
            peer.stealable = stealable;
        }
    }

    /// `id` answered after `took`, with so many jobs, and said what its load is then or not.
    pub(super) fn answered(&mut self, id: &NodeId, took: Duration, jobs: usize, told_load: bool) {
        self.avoided.remove(id);
        let Some(peer) = self.known.get_mut(id) else { return };
        peer.round_trip = Some(smooth(peer.round_trip, took));
        peer.registered = jobs == 0;
        if jobs == 0 {
            // Whatever its load says: it does not give it to this node now.
            peer.stealable = 0;
        } else if !told_load {
            let jobs = u32::try_from(jobs).unwrap_or(u32::MAX);
            peer.stealable = peer.stealable.saturating_sub(jobs);
        }
    }

    /// `id` did not answer: it is avoided for a while, twice as long each time.
    pub(super) fn failed(&mut self, now: Instant, id: &NodeId, rng: &mut fastrand::Rng) {
        if !self.known.contains_key(id) {
            return;
        }
        let failures = self.avoided.get(id).map_or(0, |avoided| avoided.failures);
        let backoff = STEAL_BACKOFF.saturating_mul(1 << failures.min(16)).min(STEAL_BACKOFF_MAX);
        // Up to a quarter more, so that peers who failed together do not return together.
        let jitter = Duration::from_micros(rng.u64(0..=micros(backoff) / 4));
        let avoided =
            Avoided { until: now + backoff + jitter, failures: failures.saturating_add(1) };
        self.avoided.insert(id.clone(), avoided);
    }

    /// The store took so long to transfer.
    pub(super) fn transfer_took(&mut self, took: Duration) {
        self.transfer_time = smooth(Some(self.transfer_time), took);
    }

    /// Nobody remembers this node.
    pub(super) fn unregister(&mut self) {
        for peer in self.known.values_mut() {
            peer.registered = false;
        }
    }

    /// Who has something that is worth the trip, by id.
    pub(super) fn candidates(&self, now: Instant) -> Vec<(NodeId, Prospect)> {
        self.known
            .iter()
            .filter(|(id, peer)| self.is_candidate(peer) && !self.is_avoided(now, id))
            .map(|(id, peer)| (id.clone(), self.prospect(peer)))
            .collect()
    }

    /// Whom to register with as an idle node.
    pub(super) fn lifelines(&self, now: Instant) -> impl Iterator<Item = &NodeId> {
        self.lifelines.iter().filter(move |id| self.is_missing(id) && !self.is_avoided(now, id))
    }

    /// When the next peer that is avoided, and would be asked otherwise, is not avoided any more.
    pub(super) fn next_return(&self, now: Instant) -> Option<Instant> {
        let missed = |id: &NodeId| {
            self.known.get(id).is_some_and(|p| self.is_candidate(p))
                || (self.lifelines.contains(id) && self.is_missing(id))
        };
        self.avoided
            .iter()
            .filter(|(id, avoided)| avoided.until > now && missed(id))
            .map(|(_, avoided)| avoided.until)
            .min()
    }

    /// The longest time that a steal from one of those with jobs would take, as far as measured.
    pub(super) fn longest_trip(&self) -> Option<Duration> {
        self.known
            .values()
            .filter(|peer| peer.stealable > 0 && peer.member.state == MemberState::Alive)
            .filter_map(|peer| peer.round_trip)
            .max()
            .map(|trip| trip + self.transfer_time)
    }

    fn is_candidate(&self, peer: &Peer) -> bool {
        peer.member.state == MemberState::Alive && self.prospect(peer).is_worth_a_trip()
    }

    fn is_missing(&self, lifeline: &NodeId) -> bool {
        self.known.get(lifeline).is_some_and(|peer| !peer.registered)
    }

    fn is_avoided(&self, now: Instant, id: &NodeId) -> bool {
        self.avoided.get(id).is_some_and(|avoided| avoided.until > now)
    }

    fn prospect(&self, peer: &Peer) -> Prospect {
        let load = peer.load.unwrap_or_default();
        let surplus = peer.load.map_or(u32::MAX, |load| {
            // A hint may be newer than the load.
            let queued = load.queued.max(peer.stealable);
            Load { queued, ..load }.surplus_over(&self.own)
        });
        Prospect {
            surplus,
            stealable: peer.stealable,
            service_us: load.service_us,
            slots: load.slots,
            cost: peer.round_trip.map_or(Duration::ZERO, |trip| trip + self.transfer_time),
        }
    }
}

/// A smoothed duration that falls fast and rises slowly: the first sample includes opening a
/// connection, and a stall is not a distance.
fn smooth(known: Option<Duration>, sample: Duration) -> Duration {
    match known {
        None => sample,
        Some(known) if sample < known => (known + sample) / 2,
        Some(known) => (known * 7 + sample) / 8,
    }
}
