//! The rules of a thief: when to ask, whom, and how what is offered becomes this node's.
//!
//! Room comes with [`Thief::handle_idle`] and is held only while a request or a transfer is under
//! way; what is not in use goes back at once ([`Effect::RoomBack`]). The thief stays hungry: when it
//! hears of work worth a trip, it asks for room again ([`Effect::WantRoom`]).
//!
//! With nobody worth asking it registers with its lifelines, one request each, and is silent: a mesh
//! with no work sends no steal traffic.
//!
//! A job of an offer is this node's once the store says so, and not before. What can break:
//!
//! | lost | what follows |
//! |---|---|
//! | the request, or its answer | it counts as failed; the victim retakes what it offered |
//! | the transfer's answer | the thief reads back what it holds, and keeps that |
//! | the settlement | the victim's retake finds nothing |
//! | the thief, before the transfer | the victim retakes; a late transfer finds nothing |
//! | the thief, after it | its lease governs |
//! | the victim | the transfer is valid until a reaper moved the token |

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::lifeline::lifelines_of;
use super::victim::{Prospect, better_of_two};
use crate::id::{FencingToken, Generation, JobId, NodeId, Owner};
use crate::job::{Claim, ClaimedJob};
use crate::limits::{
    ASK_TIMEOUT, DEQUE_CAPACITY_MAX, MEMBERS_MAX, READ_BACK_TRIES_MAX, STEAL_BACKOFF,
    STEAL_BACKOFF_MAX, STEAL_BATCH_MAX, TRANSFER_TIMEOUT,
};
use crate::load::{Load, LoadReport, LoadTable};
use crate::swim::{Member, MemberState, MembershipEvent};
use crate::time::{Instant, micros};
use crate::wire::stream::{Offer, OfferedJob};

/// What a thief may be told to do otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StealConfig {
    /// Most jobs asked of one victim at a time, 1 to [`STEAL_BATCH_MAX`].
    pub max_steal_batch: usize,
    /// Requests under way at a time, at least 1. Each is to another victim.
    pub asks_max: usize,
    /// The capacity of this node's deque: half of it is the most that a low water asks for.
    pub capacity: usize,
}

impl Default for StealConfig {
    fn default() -> Self {
        Self { max_steal_batch: 16, asks_max: 2, capacity: 64 }
    }
}

/// Why a request got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// No connection.
    #[error("the victim cannot be reached")]
    Unreachable,
    /// No answer in time.
    #[error("the victim did not answer in time")]
    TimedOut,
    /// The connection ended, or what came is no answer.
    #[error("the connection to the victim broke")]
    Broken,
}

/// Why the store did not say what a transfer, or a reading back, came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The store is as it was before, for certain.
    #[error("the store did not do it")]
    Undone,
    /// It may have been done.
    #[error("the store's answer was lost")]
    Unknown,
}

/// A claim that the store moved to this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The job, with the token that this node now holds.
    pub claim: Claim,
    /// The whole job, if it was asked for.
    pub job: Option<ClaimedJob>,
}

/// What the thief is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// Send a request. Answer with [`Thief::handle_offer`].
    Ask {
        /// Whom, at its steal port.
        victim: Member,
        /// Numbers the request.
        seq: u32,
        /// Most jobs.
        max: u32,
    },
    /// Transfer these claims in the store, from the victim to this node. Answer with
    /// [`Thief::handle_transferred`].
    Transfer {
        /// Who holds them.
        victim: Owner,
        /// Which offer.
        offer: u64,
        /// The claims as offered.
        claims: Vec<Claim>,
        /// Of these the whole job is wanted.
        fetch: Vec<JobId>,
    },
    /// Ask the store which unstarted claims this node holds. Answer with
    /// [`Thief::handle_read_back`].
    ReadBack {
        /// Of the transfer.
        victim: Owner,
        /// Of the transfer.
        offer: u64,
        /// What this node holds if the transfer was done.
        claims: Vec<Claim>,
    },
    /// Tell the victim what this node got.
    Settle {
        /// Whom.
        victim: NodeId,
        /// Which offer.
        offer: u64,
        /// The jobs that are this node's.
        taken: Vec<JobId>,
    },
    /// Put these jobs into the deque, into the room that was lent.
    Push {
        /// The jobs.
        jobs: Vec<ClaimedJob>,
        /// From whom.
        from: NodeId,
    },
    /// Give room back to the deque.
    RoomBack {
        /// How much.
        room: usize,
    },
    /// Ask the deque for room. Answer with [`Thief::handle_idle`], with a room of 0 if there is none.
    WantRoom,
    /// The deque should look for more work already at so many jobs.
    LowWater {
        /// How many.
        jobs: usize,
    },
}

/// What has been counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StealCounters {
    /// Requests sent.
    pub steals_initiated: u64,
    /// Offers of which this node got something.
    pub steals_succeeded: u64,
    /// Jobs that this node got.
    pub jobs_stolen_in: u64,
}

#[derive(Clone, Debug)]
struct Peer {
    member: Member,
    /// What its load said last, of this boot.
    load: Load,
    /// What it would give: its load, or what it said to this node since.
    stealable: u32,
    round_trip: Option<Duration>,
    /// Whether its last answer was empty: it remembers this node.
    registered: bool,
}

impl Peer {
    fn new(member: Member) -> Self {
        Self { member, load: Load::default(), stealable: 0, round_trip: None, registered: false }
    }
}

#[derive(Clone, Copy, Debug)]
struct Avoided {
    until: Instant,
    failures: u32,
}

#[derive(Clone, Debug)]
struct Ask {
    seq: u32,
    max: usize,
    generation: Generation,
    sent: Instant,
    lifeline: bool,
}

#[derive(Clone, Debug)]
struct Transfer {
    jobs: BTreeMap<JobId, OfferedJob>,
    sent: Instant,
    deadline: Instant,
    /// Readings back so far; 0 while the transfer's own answer is awaited.
    tries: u32,
    /// Whether a reading back is under way.
    reading: bool,
}

/// Decides whom to steal from, and follows each steal to its end.
///
/// Each input may queue effects; [`Thief::poll_effect`] hands them out until it returns `None`.
/// [`Thief::poll_timeout`] says when [`Thief::handle_timeout`] is due, and is asked again after each
/// input.
#[derive(Debug)]
pub struct Thief {
    me: NodeId,
    config: StealConfig,
    rng: fastrand::Rng,
    now: Instant,
    peers: BTreeMap<NodeId, Peer>,
    loads: LoadTable,
    lifelines: Vec<NodeId>,
    avoided: BTreeMap<NodeId, Avoided>,
    asks: BTreeMap<NodeId, Ask>,
    transfers: BTreeMap<(Owner, u64), Transfer>,
    next_seq: u32,
    own: Load,
    transfer_time: Duration,
    /// Room in hand, while an input is being handled.
    room: usize,
    hungry: bool,
    room_wanted: bool,
    low_water: usize,
    closed: bool,
    counters: StealCounters,
    effects: VecDeque<Effect>,
}

impl Thief {
    /// The thief of node `me`, which knows nobody yet. `seed` decides its random choices. Values of
    /// `config` outside their ranges count as the nearest inside.
    pub fn new(me: NodeId, config: StealConfig, seed: u64) -> Self {
        let config = StealConfig {
            max_steal_batch: config.max_steal_batch.clamp(1, STEAL_BATCH_MAX),
            asks_max: config.asks_max.max(1),
            capacity: config.capacity.clamp(1, DEQUE_CAPACITY_MAX),
        };
        Self {
            me,
            config,
            rng: fastrand::Rng::with_seed(seed),
            now: Instant::ZERO,
            peers: BTreeMap::new(),
            loads: LoadTable::default(),
            lifelines: Vec::new(),
            avoided: BTreeMap::new(),
            asks: BTreeMap::new(),
            transfers: BTreeMap::new(),
            next_seq: 0,
            own: Load::default(),
            transfer_time: Duration::ZERO,
            room: 0,
            hungry: false,
            room_wanted: false,
            low_water: 0,
            closed: false,
            counters: StealCounters::default(),
            effects: VecDeque::new(),
        }
    }

    /// The next thing to do.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When the next answer is overdue, or a peer that was avoided may be asked again.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let asks = self.asks.values().map(|ask| ask.sent + ASK_TIMEOUT);
        let transfers = self.transfers.values().map(|transfer| transfer.deadline);
        let wanted = self.hungry && !self.closed;
        let avoided = self
            .avoided
            .iter()
            .filter(|(id, avoided)| wanted && avoided.until > self.now && self.is_missed(id))
            .map(|(_, avoided)| avoided.until);
        asks.chain(transfers).chain(avoided).min()
    }

    /// What has been counted.
    pub fn counters(&self) -> StealCounters {
        self.counters
    }

    /// The deque has room for `room` jobs and wants them; or, with a `room` of 0, in answer to
    /// [`Effect::WantRoom`], it does not. `own` is this node's load.
    pub fn handle_idle(&mut self, now: Instant, room: usize, own: Load) {
        self.now = now;
        self.own = own;
        self.room_wanted = false;
        self.hungry = room > 0;
        self.room += room;
        self.pursue();
        self.update_low_water();
    }

    /// Members come, go, and are suspected. A suspect is asked nothing new.
    pub fn handle_membership(&mut self, now: Instant, event: &MembershipEvent) {
        self.now = now;
        if let MembershipEvent::Snapshot { members, .. } = event {
            let present: BTreeSet<&NodeId> =
                members.iter().filter(|m| m.is_present()).map(|m| &m.id).collect();
            let gone: Vec<NodeId> =
                self.peers.keys().filter(|id| !present.contains(id)).cloned().collect();
            for id in gone {
                self.remove(&id);
            }
            for member in members.iter() {
                self.upsert(member);
            }
        } else if let Some(member) = event.member() {
            self.upsert(member);
        }
        let mut ids: Vec<NodeId> = self
            .peers
            .values()
            .filter(|peer| peer.member.state == MemberState::Alive)
            .map(|peer| peer.member.id.clone())
            .collect();
        let here = ids.partition_point(|id| *id < self.me);
        ids.insert(here, self.me.clone());
        self.lifelines = lifelines_of(here, &ids);
        self.pursue();
    }

    /// A peer's load, as gossip brings it.
    pub fn handle_load(&mut self, now: Instant, report: &LoadReport) {
        self.now = now;
        if report.node != self.me && self.observe(report) {
            self.pursue();
        }
    }

    /// A lifeline says that it has work.
    pub fn handle_hint(&mut self, now: Instant, from: &NodeId, stealable: u32) {
        self.now = now;
        if let Some(peer) = self.peers.get_mut(from) {
            peer.stealable = stealable;
            self.pursue();
        }
    }

    /// A victim answered, or did not. Only the first answer to a request counts.
    pub fn handle_offer(
        &mut self,
        now: Instant,
        victim: &NodeId,
        seq: u32,
        answer: Result<Offer, AskError>,
    ) {
        self.now = now;
        if self.asks.get(victim).is_none_or(|ask| ask.seq != seq) {
            return;
        }
        let Some(ask) = self.asks.remove(victim) else { return };
        self.room += ask.max;
        match answer {
            Ok(offer) => self.take_offer(victim, &ask, offer),
            Err(_) => self.avoid(victim),
        }
        self.pursue();
        self.update_low_water();
    }

    /// The store answered a transfer. `moved` is what this node got.
    pub fn handle_transferred(
        &mut self,
        now: Instant,
        victim: &Owner,
        offer: u64,
        moved: Result<Vec<Moved>, TransferError>,
    ) {
        self.now = now;
        let key = (victim.clone(), offer);
        let Some(transfer) = self.transfers.get(&key) else { return };
        let moved = match moved {
            Ok(moved) => {
                let took = now.saturating_since(transfer.sent);
                self.transfer_time = smooth(Some(self.transfer_time), took);
                moved
            }
            Err(TransferError::Undone) if transfer.tries == 0 => Vec::new(),
            Err(_) => {
                if transfer.tries == 0 {
                    self.read_back(&key);
                }
                return;
            }
        };
        self.conclude(&key, moved);
    }

    /// The store listed the unstarted claims that this node holds, or did not.
    pub fn handle_read_back(
        &mut self,
        now: Instant,
        victim: &Owner,
        offer: u64,
        held: Result<Vec<Claim>, TransferError>,
    ) {
        self.now = now;
        let key = (victim.clone(), offer);
        let Some(transfer) = self.transfers.get_mut(&key).filter(|t| t.reading) else { return };
        let Ok(held) = held else {
            // Tried again at the deadline, which is set already.
            transfer.reading = false;
            return;
        };
        let held: BTreeSet<Claim> = held.into_iter().collect();
        let moved = moved_claims(transfer)
            .filter(|claim| held.contains(claim))
            .map(|claim| Moved { claim, job: None })
            .collect();
        self.conclude(&key, moved);
    }

    /// Counts overdue answers as lost, and asks again whom it avoided.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = now;
        let overdue: Vec<NodeId> = self
            .asks
            .iter()
            .filter(|(_, ask)| ask.sent + ASK_TIMEOUT <= now)
            .map(|(id, _)| id.clone())
            .collect();
        for id in overdue {
            if let Some(ask) = self.asks.remove(&id) {
                self.room += ask.max;
                self.avoid(&id);
            }
        }
        let unanswered: Vec<(Owner, u64)> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.deadline <= now)
            .map(|(key, _)| key.clone())
            .collect();
        for key in unanswered {
            self.read_back(&key);
        }
        self.pursue();
    }

    /// The lease is lost: what this boot was about to get is not to be had. Forgets all requests and
    /// transfers, and gives their room back.
    pub fn clear(&mut self) {
        let asked: usize = self.asks.values().map(|ask| ask.max).sum();
        let offered: usize = self.transfers.values().map(|transfer| transfer.jobs.len()).sum();
        self.asks.clear();
        self.transfers.clear();
        for peer in self.peers.values_mut() {
            peer.registered = false;
        }
        self.room += asked + offered;
        self.give_back();
    }

    /// Asks nobody from now on; transfers under way are followed to their end.
    pub fn close(&mut self) {
        self.closed = true;
    }

    fn upsert(&mut self, member: &Member) {
        if member.id == self.me {
            return;
        }
        if !member.is_present() {
            self.remove(&member.id);
            return;
        }
        let full = self.peers.len() >= MEMBERS_MAX;
        match self.peers.get_mut(&member.id) {
            Some(peer) if peer.member.generation == member.generation => {
                peer.member = member.clone();
                return;
            }
            None if full => return,
            _ => self.remove(&member.id),
        }
        let mut peer = Peer::new(member.clone());
        if let Some(report) = self.loads.report_of(self.now, &member.id)
            && report.generation == member.generation
        {
            peer.load = report.load;
            peer.stealable = report.load.stealable;
        }
        self.peers.insert(member.id.clone(), peer);
    }

    fn remove(&mut self, id: &NodeId) {
        self.peers.remove(id);
        self.avoided.remove(id);
        if let Some(ask) = self.asks.remove(id) {
            self.room += ask.max;
        }
    }

    /// Whether the report was news of a boot that is known.
    fn observe(&mut self, report: &LoadReport) -> bool {
        if !self.loads.observe(self.now, report) {
            return false;
        }
        match self.peers.get_mut(&report.node) {
            Some(peer) if peer.member.generation == report.generation => {
                peer.load = report.load;
                peer.stealable = report.load.stealable;
                true
            }
            _ => false,
        }
    }

    fn avoid(&mut self, id: &NodeId) {
        let failures = self.avoided.get(id).map_or(0, |avoided| avoided.failures);
        let backoff = STEAL_BACKOFF.saturating_mul(1 << failures.min(16)).min(STEAL_BACKOFF_MAX);
        // Up to a quarter more, so that peers who failed together do not return together.
        let jitter = Duration::from_micros(self.rng.u64(0..=micros(backoff) / 4));
        let avoided = Avoided { until: self.now + backoff + jitter, failures: failures + 1 };
        if self.peers.contains_key(id) {
            self.avoided.insert(id.clone(), avoided);
        }
    }

    fn take_offer(&mut self, victim: &NodeId, ask: &Ask, offer: Offer) {
        self.avoided.remove(victim);
        if let Some(report) = &offer.load
            && report.node == *victim
        {
            self.observe(report);
        }
        let key = (Owner { node: victim.clone(), generation: ask.generation }, offer.offer);
        let mut jobs = BTreeMap::new();
        for job in offer.jobs {
            if jobs.len() < ask.max {
                jobs.entry(job.claim().job).or_insert(job);
            }
        }
        let took = self.now.saturating_since(ask.sent);
        if let Some(peer) = self.peers.get_mut(victim) {
            peer.round_trip = Some(smooth(peer.round_trip, took));
            peer.registered = jobs.is_empty();
            if jobs.is_empty() {
                peer.stealable = 0;
            } else if offer.load.is_none() {
                let offered = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
                peer.stealable = peer.stealable.saturating_sub(offered);
            }
        }
        if jobs.is_empty() || self.transfers.contains_key(&key) {
            return;
        }
        self.room -= jobs.len();
        let fetch = jobs
            .values()
            .filter(|job| !matches!(job, OfferedJob::Whole(_)))
            .map(|job| job.claim().job)
            .collect();
        self.effects.push_back(Effect::Transfer {
            victim: key.0.clone(),
            offer: key.1,
            claims: jobs.values().map(OfferedJob::claim).collect(),
            fetch,
        });
        let deadline = self.now + TRANSFER_TIMEOUT;
        let transfer = Transfer { jobs, sent: self.now, deadline, tries: 0, reading: false };
        self.transfers.insert(key, transfer);
    }

    /// Asks the store what a transfer came to; gives up after some tries.
    fn read_back(&mut self, key: &(Owner, u64)) {
        let Some(transfer) = self.transfers.get_mut(key) else { return };
        if transfer.tries >= READ_BACK_TRIES_MAX {
            self.room += transfer.jobs.len();
            self.transfers.remove(key);
            self.pursue();
            return;
        }
        transfer.tries += 1;
        transfer.reading = true;
        transfer.deadline = self.now + TRANSFER_TIMEOUT;
        self.effects.push_back(Effect::ReadBack {
            victim: key.0.clone(),
            offer: key.1,
            claims: moved_claims(transfer).collect(),
        });
    }

    fn conclude(&mut self, key: &(Owner, u64), moved: Vec<Moved>) {
        let Some(mut transfer) = self.transfers.remove(key) else { return };
        let reserved = transfer.jobs.len();
        let mut taken = Vec::with_capacity(moved.len());
        let mut jobs = Vec::with_capacity(moved.len());
        for Moved { claim, job } in moved {
            let Some(offered) = transfer.jobs.remove(&claim.job) else { continue };
            taken.push(claim.job);
            let whole = match offered {
                OfferedJob::Whole(job) => Some(job),
                // A large job whose transfer's answer was lost stays this node's by the store alone:
                // the node readopts it when it next lists its claims.
                OfferedJob::Named(_) => job.filter(|job| job.spec.id == claim.job),
            };
            jobs.extend(whole.map(|job| ClaimedJob { token: claim.token, ..job }));
        }
        self.counters.steals_succeeded += u64::from(!taken.is_empty());
        self.counters.jobs_stolen_in += taken.len() as u64;
        self.room += reserved - jobs.len();
        let from = key.0.node.clone();
        if !jobs.is_empty() {
            self.effects.push_back(Effect::Push { jobs, from: from.clone() });
        }
        self.effects.push_back(Effect::Settle { victim: from, offer: key.1, taken });
        self.pursue();
    }

    fn is_avoided(&self, id: &NodeId) -> bool {
        self.avoided.get(id).is_some_and(|avoided| avoided.until > self.now)
    }

    /// Whether a peer that is avoided would be asked if it were not.
    fn is_missed(&self, id: &NodeId) -> bool {
        let Some(peer) = self.peers.get(id) else { return false };
        peer.member.state == MemberState::Alive
            && (self.prospect(peer).is_worth_a_trip()
                || (!peer.registered && self.lifelines.contains(id)))
    }

    fn prospect(&self, peer: &Peer) -> Prospect {
        let cost = peer.round_trip.map_or(Duration::ZERO, |trip| trip + self.transfer_time);
        Prospect {
            stealable: peer.stealable,
            service_us: peer.load.service_us,
            slots: peer.load.slots,
            cost,
        }
    }

    fn candidates(&self) -> Vec<(NodeId, Prospect)> {
        self.peers
            .iter()
            .filter(|(id, peer)| {
                peer.stealable > 0
                    && peer.member.state == MemberState::Alive
                    && !self.asks.contains_key(*id)
                    && !self.is_avoided(id)
            })
            .map(|(id, peer)| (id.clone(), self.prospect(peer)))
            .filter(|(_, prospect)| prospect.is_worth_a_trip())
            .collect()
    }

    /// The next lifeline to register with, if there is nothing better to do.
    fn next_lifeline(&self) -> Option<NodeId> {
        if !self.transfers.is_empty() || self.asks.values().any(|ask| !ask.lifeline) {
            return None;
        }
        self.lifelines
            .iter()
            .find(|id| {
                !self.asks.contains_key(*id)
                    && !self.is_avoided(id)
                    && self.peers.get(*id).is_some_and(|peer| !peer.registered)
            })
            .cloned()
    }

    /// Uses the room in hand, gives back the rest, and asks for more where there is use for it.
    fn pursue(&mut self) {
        let may_ask = self.hungry && !self.closed;
        while may_ask && self.asks.len() < self.config.asks_max {
            let candidates = self.candidates();
            let prospects: Vec<Prospect> = candidates.iter().map(|(_, p)| *p).collect();
            let choice = better_of_two(&mut self.rng, &prospects);
            let (victim, targets) = match choice {
                Some(i) => (candidates[i].0.clone(), candidates.len()),
                None => match self.next_lifeline() {
                    Some(id) => (id, 1),
                    None => break,
                },
            };
            if self.room == 0 {
                if !self.room_wanted {
                    self.room_wanted = true;
                    self.effects.push_back(Effect::WantRoom);
                }
                break;
            }
            let asks_left = self.config.asks_max - self.asks.len();
            let share = self.room.div_ceil(asks_left.min(targets));
            self.ask(&victim, share.min(self.config.max_steal_batch), choice.is_none());
        }
        self.give_back();
    }

    fn ask(&mut self, victim: &NodeId, max: usize, lifeline: bool) {
        let Some(peer) = self.peers.get(victim) else { return };
        let member = peer.member.clone();
        self.next_seq = self.next_seq.wrapping_add(1);
        self.room -= max;
        self.counters.steals_initiated += 1;
        let seq = self.next_seq;
        let generation = member.generation;
        let ask = Ask { seq, max, generation, sent: self.now, lifeline };
        self.asks.insert(victim.clone(), ask);
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        self.effects.push_back(Effect::Ask { victim: member, seq, max });
    }

    fn give_back(&mut self) {
        if self.room > 0 {
            let room = std::mem::take(&mut self.room);
            self.effects.push_back(Effect::RoomBack { room });
        }
    }

    /// So many jobs as this node works off during the longest likely round trip.
    fn update_low_water(&mut self) {
        let trip = self
            .peers
            .values()
            .filter(|peer| peer.stealable > 0 && peer.member.state == MemberState::Alive)
            .filter_map(|peer| peer.round_trip)
            .max();
        let jobs = match trip {
            Some(trip) if self.own.service_us > 0 => {
                let trip_us = micros(trip + self.transfer_time);
                let jobs = u64::from(self.own.slots).saturating_mul(trip_us)
                    / u64::from(self.own.service_us);
                usize::try_from(jobs).unwrap_or(usize::MAX).min(self.config.capacity / 2)
            }
            _ => 0,
        };
        // It rises at once and falls by halves: a round trip that varies is no news each time.
        if jobs > self.low_water || jobs < self.low_water.div_ceil(2) {
            self.low_water = jobs;
            self.effects.push_back(Effect::LowWater { jobs });
        }
    }
}

/// What this node holds if the transfer was done: each claim with the next token.
fn moved_claims(transfer: &Transfer) -> impl Iterator<Item = Claim> + '_ {
    transfer.jobs.values().map(|job| {
        let Claim { job, token: FencingToken(token) } = job.claim();
        Claim { job, token: FencingToken(token).next() }
    })
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
