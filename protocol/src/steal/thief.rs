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

use std::collections::{BTreeMap, VecDeque};

use super::peers::Peers;
use super::transfer::{Concluded, Key, Moved, TransferError, Transfers};
use super::victim::{Prospect, better_of_two};
use crate::id::{Generation, JobId, NodeId, Owner};
use crate::job::{Claim, ClaimedJob};
use crate::limits::{ASK_TIMEOUT, DEQUE_CAPACITY_MAX, STEAL_BATCH_MAX};
use crate::load::{Load, LoadReport};
use crate::swim::{Member, MembershipEvent};
use crate::time::{Instant, micros};
use crate::wire::stream::Offer;

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
struct Ask {
    seq: u32,
    max: usize,
    generation: Generation,
    sent: Instant,
    lifeline: bool,
}

/// Decides whom to steal from, and follows each steal to its end.
///
/// Each input may queue effects; [`Thief::poll_effect`] hands them out until it returns `None`.
/// [`Thief::poll_timeout`] says when [`Thief::handle_timeout`] is due, and is asked again after each
/// input.
#[derive(Debug)]
pub struct Thief {
    config: StealConfig,
    rng: fastrand::Rng,
    now: Instant,
    peers: Peers,
    asks: BTreeMap<NodeId, Ask>,
    transfers: Transfers,
    last_seq: u32,
    own: Load,
    /// Room in hand; none between inputs.
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
            config,
            rng: fastrand::Rng::with_seed(seed),
            now: Instant::ZERO,
            peers: Peers::new(me),
            asks: BTreeMap::new(),
            transfers: Transfers::default(),
            last_seq: 0,
            own: Load::default(),
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
        let returns = self.may_ask().then(|| self.peers.next_return(self.now)).flatten();
        asks.chain(self.transfers.next_deadline()).chain(returns).min()
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
        for ended in self.peers.apply(event) {
            if let Some(ask) = self.asks.remove(&ended) {
                self.room += ask.max;
            }
        }
        self.pursue();
    }

    /// A peer's load, as gossip brings it.
    pub fn handle_load(&mut self, now: Instant, report: &LoadReport) {
        self.now = now;
        if self.peers.observe(report) && report.load.stealable > 0 {
            self.pursue();
        }
    }

    /// A lifeline says that it has work.
    pub fn handle_hint(&mut self, now: Instant, from: &NodeId, stealable: u32) {
        self.now = now;
        self.peers.hinted(from, stealable);
        self.pursue();
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
            Err(_) => self.peers.failed(now, victim, &mut self.rng),
        }
        self.pursue();
        self.update_low_water();
    }

    /// The store answered a transfer: `moved` is what this node got.
    pub fn handle_transferred(
        &mut self,
        now: Instant,
        victim: &Owner,
        offer: u64,
        moved: Result<Vec<Moved>, TransferError>,
    ) {
        self.now = now;
        let key = (victim.clone(), offer);
        match self.transfers.answered(now, &key, moved) {
            Ok(concluded) => {
                self.peers.transfer_took(now.saturating_since(concluded.sent));
                self.conclude(&key, concluded);
            }
            Err(effect) => self.effects.extend(effect),
        }
    }

    /// The store listed the unstarted claims that this node holds. When it did not, the reading back
    /// is tried again at the next time-out.
    pub fn handle_read_back(
        &mut self,
        now: Instant,
        victim: &Owner,
        offer: u64,
        held: Result<Vec<Claim>, TransferError>,
    ) {
        self.now = now;
        let key = (victim.clone(), offer);
        let held = held.map(|held| held.into_iter().collect());
        if let Ok(held) = held
            && let Some(concluded) = self.transfers.read(&key, &held)
        {
            self.conclude(&key, concluded);
        }
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
                self.peers.failed(now, &id, &mut self.rng);
            }
        }
        for next in self.transfers.handle_timeout(now) {
            match next {
                Ok(read_back) => self.effects.push_back(read_back),
                Err(given_up) => self.room += given_up,
            }
        }
        self.pursue();
    }

    /// The lease is lost: what this boot was about to get is not to be had. Forgets all requests and
    /// transfers, and gives their room back.
    pub fn clear(&mut self) {
        let asked: usize = self.asks.values().map(|ask| ask.max).sum();
        self.asks.clear();
        self.room += asked + self.transfers.clear();
        self.peers.unregister();
        self.give_back();
    }

    /// Asks nobody from now on; transfers under way are followed to their end.
    pub fn close(&mut self) {
        self.closed = true;
    }

    fn may_ask(&self) -> bool {
        self.hungry && !self.closed
    }

    fn take_offer(&mut self, victim: &NodeId, ask: &Ask, offer: Offer) {
        let told_load =
            offer.load.is_some_and(|load| load.node == *victim && self.peers.observe(&load));
        let mut jobs = BTreeMap::new();
        for job in offer.jobs {
            if jobs.len() < ask.max {
                jobs.entry(job.claim().job).or_insert(job);
            }
        }
        let took = self.now.saturating_since(ask.sent);
        self.peers.answered(victim, took, jobs.len(), told_load);
        let key = (Owner { node: victim.clone(), generation: ask.generation }, offer.offer);
        if jobs.is_empty() || self.transfers.contains(&key) {
            return;
        }
        self.room -= jobs.len();
        let effect = self.transfers.begin(self.now, key, jobs);
        self.effects.push_back(effect);
    }

    fn conclude(&mut self, key: &Key, concluded: Concluded) {
        let Concluded { offered, taken, jobs, .. } = concluded;
        self.counters.steals_succeeded += u64::from(!taken.is_empty());
        self.counters.jobs_stolen_in += taken.len() as u64;
        self.room += offered - jobs.len();
        let from = key.0.node.clone();
        if !jobs.is_empty() {
            self.effects.push_back(Effect::Push { jobs, from: from.clone() });
        }
        self.effects.push_back(Effect::Settle { victim: from, offer: key.1, taken });
        self.pursue();
    }

    /// The next peer to ask, and among how many it was chosen; a lifeline when there is nobody
    /// better, and nothing that may still come of what is under way.
    fn choose(&mut self) -> Option<(NodeId, usize, bool)> {
        let mut candidates = self.peers.candidates(self.now);
        candidates.retain(|(id, _)| !self.asks.contains_key(id));
        let prospects: Vec<Prospect> = candidates.iter().map(|(_, prospect)| *prospect).collect();
        if let Some(i) = better_of_two(&mut self.rng, &prospects) {
            return Some((candidates.swap_remove(i).0, prospects.len(), false));
        }
        if !self.transfers.is_empty() || self.asks.values().any(|ask| !ask.lifeline) {
            return None;
        }
        let lifelines = self.peers.lifelines(self.now);
        let open: Vec<&NodeId> = lifelines.filter(|id| !self.asks.contains_key(*id)).collect();
        open.first().map(|id| ((*id).clone(), open.len(), true))
    }

    /// Uses the room in hand, gives back the rest, and asks for more where there is use for it.
    fn pursue(&mut self) {
        while self.may_ask() && self.asks.len() < self.config.asks_max {
            if self.room == 0 && self.room_wanted {
                break;
            }
            let Some((victim, choices, lifeline)) = self.choose() else { break };
            if self.room == 0 {
                self.room_wanted = true;
                self.effects.push_back(Effect::WantRoom);
                break;
            }
            let asks_left = self.config.asks_max - self.asks.len();
            let share = self.room.div_ceil(asks_left.min(choices));
            self.ask(victim, share.min(self.config.max_steal_batch), lifeline);
        }
        self.give_back();
    }

    fn ask(&mut self, id: NodeId, max: usize, lifeline: bool) {
        let member = self.peers.member(&id).expect("only known peers are chosen").clone();
        self.last_seq = self.last_seq.wrapping_add(1);
        self.room -= max;
        self.counters.steals_initiated += 1;
        let (seq, generation) = (self.last_seq, member.generation);
        self.asks.insert(id, Ask { seq, max, generation, sent: self.now, lifeline });
        let max = u32::try_from(max).expect("a batch is at most STEAL_BATCH_MAX");
        self.effects.push_back(Effect::Ask { victim: member, seq, max });
    }

    fn give_back(&mut self) {
        if self.room > 0 {
            let room = std::mem::take(&mut self.room);
            self.effects.push_back(Effect::RoomBack { room });
        }
    }

    /// So many jobs as this node works off during the longest likely steal.
    fn update_low_water(&mut self) {
        let jobs = match self.peers.longest_trip() {
            Some(trip) if self.own.service_us > 0 => {
                let jobs = u64::from(self.own.slots).saturating_mul(micros(trip))
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
