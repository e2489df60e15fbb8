//! The rules of a thief: when to ask, whom, and how what is offered becomes this node's.
//!
//! Room comes with [`Thief::handle_idle`] and is held only while a request or a transfer is under
//! way; what is not in use goes back at once ([`Effect::RoomBack`]). The thief stays hungry: when it
//! hears of work worth a trip, it asks for room again ([`Effect::WantRoom`]).
//!
//! While a transfer is under way it asks nobody: only what comes tells whether the deque is still
//! low, and a victim answers a peer only so often. However a transfer ends, its unused room goes back
//! and, if somebody is worth asking, the deque decides whether it lends again.
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
    /// When it last looked whom to ask: a peer whose return lies after that is still waited for.
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
        self.peers.set_own(own);
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
        if self.peers.observe(report) && report.load.stealable > 0 {
            self.now = now;
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
        if self.asks.get(victim).is_none_or(|ask| ask.seq != seq) {
            return;
        }
        let Some(ask) = self.asks.remove(victim) else { return };
        self.now = now;
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
        self.pursue();
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
        self.pursue();
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
                Err(given_up) => {
                    self.room += given_up;
                    self.give_back();
                }
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
        self.pursue();
    }

    /// Asks nobody from now on; transfers under way are followed to their end.
    pub fn close(&mut self) {
        self.closed = true;
    }

    fn may_ask(&self) -> bool {
        self.hungry && !self.closed && self.transfers.is_empty()
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
        self.give_back();
    }

    /// The next peer to ask, and among how many it was chosen; a lifeline when there is nobody
    /// better, and no victim that may still offer something.
    fn choose(&mut self) -> Option<(NodeId, usize, bool)> {
        let mut candidates = self.peers.candidates(self.now);
        candidates.retain(|(id, _)| !self.asks.contains_key(id));
        let prospects: Vec<Prospect> = candidates.iter().map(|(_, prospect)| *prospect).collect();
        if let Some(i) = better_of_two(&mut self.rng, &prospects) {
            return Some((candidates.swap_remove(i).0, prospects.len(), false));
        }
        if self.asks.values().any(|ask| !ask.lifeline) {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::deque::fixtures::{at_ms, claimed, id, job, node, numbers, spec};
    use crate::id::{FencingToken, Incarnation};
    use crate::limits::{READ_BACK_TRIES_MAX, STEAL_BACKOFF_MAX};
    use crate::swim::MemberState;
    use crate::wire::stream::OfferedJob;

    fn member(name: &str) -> Member {
        let addr = "127.0.0.1:1".parse().unwrap();
        Member {
            id: node(name),
            generation: Generation(1),
            incarnation: Incarnation(0),
            state: MemberState::Alive,
            gossip: addr,
            steal: addr,
        }
    }

    fn boot(name: &str) -> Owner {
        Owner { node: node(name), generation: Generation(1) }
    }

    /// The thief "a" that knows the members `names`, without a load of any.
    fn thief(names: &[&str]) -> Thief {
        with_config(names, StealConfig::default(), 1)
    }

    fn with_config(names: &[&str], config: StealConfig, seed: u64) -> Thief {
        let mut it = Thief::new(node("a"), config, seed);
        let members = names.iter().chain(&["a"]).map(|name| member(name)).collect();
        it.handle_membership(at_ms(0), &MembershipEvent::Snapshot { epoch: 1, members });
        assert_eq!(effects(&mut it), []);
        it
    }

    /// Jobs of 10 ms in one slot: `stealable` of them drain in as many times 10 ms.
    fn load(name: &str, version: u64, stealable: u32) -> LoadReport {
        let (queued, running, slots, service_us) = (stealable, 1, 1, 10_000);
        let load = Load { version, stealable, queued, running, slots, service_us };
        LoadReport { node: node(name), generation: Generation(1), load, age_ms: 0 }
    }

    /// The thief's own load: all its slots are free.
    const IDLE: Load =
        Load { version: 1, stealable: 0, queued: 0, running: 0, slots: 4, service_us: 0 };

    fn effects(it: &mut Thief) -> Vec<Effect> {
        std::iter::from_fn(|| it.poll_effect()).collect()
    }

    fn idle(it: &mut Thief, ms: u64, room: usize) -> Vec<Effect> {
        it.handle_idle(at_ms(ms), room, IDLE);
        effects(it)
    }

    fn ask(name: &str, seq: u32, max: u32) -> Effect {
        Effect::Ask { victim: member(name), seq, max }
    }

    fn asked(effects: &[Effect]) -> Vec<&str> {
        effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Ask { victim, .. } => Some(victim.id.as_str()),
                _ => None,
            })
            .collect()
    }

    fn offer(seq: u32, offer: u64, jobs: Vec<ClaimedJob>) -> Result<Offer, AskError> {
        let jobs = jobs.into_iter().map(OfferedJob::Whole).collect();
        Ok(Offer { seq, offer, expires_ms: 5_000, jobs, load: None })
    }

    fn claim(n: u64, token: u64) -> Claim {
        Claim { job: id(n), token: FencingToken(token) }
    }

    fn moved(n: u64, token: u64) -> Moved {
        Moved { claim: claim(n, token), job: None }
    }

    /// A thief that was offered jobs 1 and 2 by "b", in offer 7, and had asked for 4.
    fn offered() -> Thief {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        assert_eq!(idle(&mut it, 0, 4), [ask("b", 1, 4)]);
        offer_two(&mut it);
        it
    }

    /// The same, but before "b" answered it asked "c" for 3.
    fn offered_while_asking() -> Thief {
        let mut it = thief(&["b", "c"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        assert_eq!(idle(&mut it, 0, 4), [ask("b", 1, 4)]);
        it.handle_load(at_ms(10), &load("c", 1, 100));
        assert_eq!(effects(&mut it), [Effect::WantRoom]);
        assert_eq!(idle(&mut it, 10, 3), [ask("c", 2, 3)]);
        offer_two(&mut it);
        it
    }

    fn offer_two(it: &mut Thief) {
        it.handle_offer(at_ms(20), &node("b"), 1, offer(1, 7, vec![job(1), job(2)]));
        let transfer = Effect::Transfer {
            victim: boot("b"),
            offer: 7,
            claims: vec![claim(1, 1), claim(2, 1)],
            fetch: vec![],
        };
        assert_eq!(effects(it), [transfer, Effect::RoomBack { room: 2 }]);
    }

    fn settle(taken: &[u64]) -> Effect {
        let taken = taken.iter().map(|&n| id(n)).collect();
        Effect::Settle { victim: node("b"), offer: 7, taken }
    }

    fn pushed(jobs: Vec<ClaimedJob>) -> Effect {
        Effect::Push { jobs, from: node("b") }
    }

    #[test]
    fn a_steal_takes_what_the_store_moved_under_its_new_token() {
        let mut it = offered();
        it.handle_transferred(at_ms(41), &boot("b"), 7, Ok(vec![moved(2, 2), moved(9, 2)]));
        let got = pushed(vec![claimed(spec(2), 2)]);
        let rest = Effect::RoomBack { room: 1 };
        assert_eq!(effects(&mut it), [got, settle(&[2]), rest, Effect::WantRoom]);
        let counted = StealCounters { steals_initiated: 1, steals_succeeded: 1, jobs_stolen_in: 1 };
        assert_eq!(it.counters(), counted);
    }

    #[test]
    fn nobody_is_asked_until_the_deque_saw_what_came_and_lent_again() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 60));
        assert_eq!(idle(&mut it, 0, 64), [ask("b", 1, 16), Effect::RoomBack { room: 48 }]);
        it.handle_offer(at_ms(20), &node("b"), 1, offer(1, 7, (1..=16).map(job).collect()));
        let [Effect::Transfer { .. }] = effects(&mut it)[..] else { panic!("a transfer") };
        it.handle_hint(at_ms(21), &node("b"), 44);
        it.handle_load(at_ms(22), &load("b", 2, 44));
        it.handle_timeout(at_ms(23));
        assert_eq!(effects(&mut it), [], "nor is room wanted");
        assert_eq!(idle(&mut it, 24, 24), [Effect::RoomBack { room: 24 }]);

        let came = (1..=15).map(|n| moved(n, 2)).collect();
        it.handle_transferred(at_ms(30), &boot("b"), 7, Ok(came));
        let got = pushed((1..=15).map(|n| claimed(spec(n), 2)).collect());
        let settled = settle(&(1..=15).collect::<Vec<u64>>());
        let rest = Effect::RoomBack { room: 1 };
        assert_eq!(effects(&mut it), [got, settled, rest, Effect::WantRoom]);
        it.handle_hint(at_ms(31), &node("b"), 44);
        assert_eq!(effects(&mut it), []);
        assert_eq!(idle(&mut it, 32, 0), [], "the deque is not low");
        it.handle_hint(at_ms(33), &node("b"), 44);
        assert_eq!(effects(&mut it), []);
        assert_eq!(it.counters().steals_initiated, 1);
        assert_eq!(idle(&mut it, 40, 24), [ask("b", 2, 16), Effect::RoomBack { room: 8 }]);
    }

    #[test]
    fn requests_that_are_out_stay_out_during_a_transfer() {
        let mut it = offered_while_asking();
        it.handle_offer(at_ms(30), &node("c"), 2, offer(2, 8, vec![job(3)]));
        let transfer = Effect::Transfer {
            victim: boot("c"),
            offer: 8,
            claims: vec![claim(3, 1)],
            fetch: vec![],
        };
        assert_eq!(effects(&mut it), [transfer, Effect::RoomBack { room: 2 }]);
        it.handle_transferred(at_ms(40), &boot("b"), 7, Ok(vec![moved(1, 2)]));
        let got = pushed(vec![claimed(spec(1), 2)]);
        let rest = Effect::RoomBack { room: 1 };
        assert_eq!(effects(&mut it), [got, settle(&[1]), rest], "another is under way");
        it.handle_transferred(at_ms(50), &boot("c"), 8, Ok(vec![moved(3, 2)]));
        let got = Effect::Push { jobs: vec![claimed(spec(3), 2)], from: node("c") };
        let settled = Effect::Settle { victim: node("c"), offer: 8, taken: vec![id(3)] };
        assert_eq!(effects(&mut it), [got, settled, Effect::WantRoom]);
    }

    #[test]
    fn large_jobs_are_fetched_with_the_transfer() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        idle(&mut it, 0, 2);
        let jobs = vec![OfferedJob::Whole(job(1)), OfferedJob::Named(claim(2, 1))];
        let answer = Offer { seq: 1, offer: 7, expires_ms: 5_000, jobs, load: None };
        it.handle_offer(at_ms(5), &node("b"), 1, Ok(answer));
        let Effect::Transfer { fetch, .. } = &effects(&mut it)[0] else { panic!("a transfer") };
        assert_eq!(numbers(fetch), [2]);
        let whole = Moved { claim: claim(2, 2), job: Some(claimed(spec(2), 2)) };
        it.handle_transferred(at_ms(6), &boot("b"), 7, Ok(vec![moved(1, 2), whole]));
        let got = pushed(vec![claimed(spec(1), 2), claimed(spec(2), 2)]);
        assert_eq!(effects(&mut it)[..2], [got, settle(&[1, 2])]);
    }

    #[test]
    fn a_lost_request_or_offer_is_given_up_and_its_victim_avoided_for_a_while() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        idle(&mut it, 0, 4);
        assert_eq!(it.poll_timeout(), Some(at_ms(3_000)));
        it.handle_timeout(at_ms(2_999));
        assert_eq!(effects(&mut it), []);
        it.handle_timeout(at_ms(3_000));
        assert_eq!(effects(&mut it), [Effect::RoomBack { room: 4 }]);
        it.handle_offer(at_ms(3_001), &node("b"), 1, offer(1, 7, vec![job(1)]));
        assert_eq!(effects(&mut it), [], "too late: the victim retakes");

        it.handle_load(at_ms(3_100), &load("b", 2, 200));
        assert_eq!(effects(&mut it), [], "it is avoided");
        let returns = it.poll_timeout().unwrap();
        assert!((at_ms(3_500)..=at_ms(3_625)).contains(&returns), "{returns:?}");
        it.handle_timeout(returns);
        assert_eq!(effects(&mut it), [Effect::WantRoom]);
        assert_eq!(idle(&mut it, 3_700, 4), [ask("b", 2, 4)]);
    }

    #[test]
    fn backoff_doubles_up_to_its_bound_and_an_answer_ends_it() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        let mut now = at_ms(0);
        let mut waits = Vec::new();
        for seq in 1..=9 {
            it.handle_idle(now, 1, IDLE);
            it.handle_offer(now, &node("b"), seq, Err(AskError::Unreachable));
            let wait = it.poll_timeout().unwrap().saturating_since(now);
            waits.push(wait.as_millis() * 4 / 5 / 100 * 100);
            now = now + STEAL_BACKOFF_MAX * 2;
            it.handle_timeout(now);
        }
        let doubled = [500u128, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000];
        for (wait, expected) in waits.iter().zip(doubled) {
            assert!(*wait >= expected * 7 / 10 && *wait <= expected, "{waits:?}");
        }
        it.handle_idle(now, 1, IDLE);
        it.handle_offer(now, &node("b"), 10, offer(10, 0, vec![]));
        it.handle_load(now, &load("b", 2, 9));
        effects(&mut it);
        assert_eq!(it.poll_timeout(), None);
    }

    #[test]
    fn a_lost_transfer_answer_is_read_back_and_only_the_next_token_counts() {
        let mut it = offered();
        it.handle_transferred(at_ms(50), &boot("b"), 7, Err(TransferError::Unknown));
        let read = |it: &mut Thief| {
            let claims = vec![claim(1, 2), claim(2, 2)];
            assert_eq!(effects(it), [Effect::ReadBack { victim: boot("b"), offer: 7, claims }]);
        };
        read(&mut it);
        it.handle_read_back(at_ms(60), &boot("b"), 7, Err(TransferError::Unknown));
        assert_eq!(effects(&mut it), []);
        assert_eq!(it.poll_timeout(), Some(at_ms(2_050)));
        it.handle_timeout(at_ms(2_050));
        read(&mut it);
        let held = vec![claim(1, 3), claim(2, 2), claim(5, 2)];
        it.handle_read_back(at_ms(2_060), &boot("b"), 7, Ok(held));
        let got = pushed(vec![claimed(spec(2), 2)]);
        let rest = Effect::RoomBack { room: 1 };
        assert_eq!(effects(&mut it), [got, settle(&[2]), rest, Effect::WantRoom]);
    }

    #[test]
    fn a_transfer_that_is_not_answered_is_read_back_too_and_its_late_answer_counts() {
        let mut it = offered();
        it.handle_timeout(at_ms(2_020));
        let [Effect::ReadBack { .. }] = effects(&mut it)[..] else { panic!("a reading back") };
        for error in [TransferError::Unknown, TransferError::Undone] {
            it.handle_transferred(at_ms(2_050), &boot("b"), 7, Err(error));
            assert_eq!(effects(&mut it), [], "the reading back decides");
        }
        it.handle_transferred(at_ms(2_100), &boot("b"), 7, Ok(vec![moved(1, 2), moved(2, 2)]));
        let got = pushed(vec![claimed(spec(1), 2), claimed(spec(2), 2)]);
        assert_eq!(effects(&mut it), [got, settle(&[1, 2]), Effect::WantRoom]);
        it.handle_read_back(at_ms(2_200), &boot("b"), 7, Ok(vec![claim(1, 2), claim(2, 2)]));
        assert_eq!(effects(&mut it), [], "each job is pushed once");
    }

    #[test]
    fn a_transfer_that_cannot_be_read_back_is_forgotten_in_the_end() {
        let mut it = offered();
        for _ in 0..READ_BACK_TRIES_MAX {
            it.handle_timeout(it.poll_timeout().unwrap());
            let [Effect::ReadBack { .. }] = effects(&mut it)[..] else { panic!("a reading back") };
        }
        it.handle_timeout(it.poll_timeout().unwrap());
        let rest = Effect::RoomBack { room: 2 };
        assert_eq!(effects(&mut it), [rest, Effect::WantRoom], "and nothing is settled");
        assert_eq!(it.poll_timeout(), None);
    }

    #[test]
    fn a_transfer_that_was_not_done_returns_all_to_the_victim() {
        let mut it = offered();
        it.handle_transferred(at_ms(50), &boot("b"), 7, Err(TransferError::Undone));
        let rest = Effect::RoomBack { room: 2 };
        assert_eq!(effects(&mut it), [settle(&[]), rest, Effect::WantRoom]);
    }

    #[test]
    fn a_second_answer_to_a_request_is_ignored() {
        let mut it = offered();
        for seq in [1, 2, 3] {
            it.handle_offer(at_ms(50), &node("b"), seq, offer(seq, 7, vec![job(1), job(2)]));
            it.handle_offer(at_ms(50), &node("c"), seq, offer(seq, 8, vec![job(3)]));
        }
        assert_eq!(effects(&mut it), []);
    }

    #[test]
    fn an_offer_of_more_than_was_asked_or_of_one_job_twice_is_cut() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 1));
        idle(&mut it, 0, 2);
        let jobs = vec![job(1), claimed(spec(1), 5), job(2), job(3)];
        it.handle_offer(at_ms(1), &node("b"), 1, offer(1, 7, jobs));
        let Effect::Transfer { claims, .. } = &effects(&mut it)[0] else { panic!("a transfer") };
        assert_eq!(claims, &[claim(1, 1), claim(2, 1)]);
    }

    #[test]
    fn the_death_of_a_victim_frees_its_request_and_leaves_its_transfers_alone() {
        let mut it = offered_while_asking();
        for name in ["b", "c"] {
            let member = Member { state: MemberState::Dead, ..member(name) };
            it.handle_membership(at_ms(710), &MembershipEvent::Died { epoch: 2, member });
        }
        assert_eq!(effects(&mut it), [Effect::RoomBack { room: 3 }]);
        it.handle_offer(at_ms(720), &node("c"), 2, offer(2, 8, vec![job(3)]));
        assert_eq!(effects(&mut it), []);
        it.handle_transferred(at_ms(730), &boot("b"), 7, Ok(vec![moved(1, 2), moved(2, 2)]));
        let got = pushed(vec![claimed(spec(1), 2), claimed(spec(2), 2)]);
        assert_eq!(effects(&mut it), [got, settle(&[1, 2])]);
    }

    #[test]
    fn a_lost_lease_forgets_everything_under_way() {
        let mut it = offered_while_asking();
        it.clear();
        assert_eq!(effects(&mut it), [Effect::RoomBack { room: 5 }, Effect::WantRoom]);
        it.handle_transferred(at_ms(730), &boot("b"), 7, Ok(vec![moved(1, 2), moved(2, 2)]));
        it.handle_offer(at_ms(730), &node("c"), 2, offer(2, 8, vec![job(3)]));
        assert_eq!(effects(&mut it), []);
        it.close();
        assert_eq!(idle(&mut it, 800, 3), [Effect::RoomBack { room: 3 }]);
    }

    #[test]
    fn room_is_divided_between_the_requests_and_the_rest_goes_back() {
        let mut it = thief(&["b", "c", "d"]);
        for name in ["b", "c", "d"] {
            it.handle_load(at_ms(0), &load(name, 1, 100));
        }
        let asks = |effects: &[Effect]| -> Vec<u32> {
            let max = |effect: &Effect| match effect {
                Effect::Ask { max, .. } => Some(*max),
                _ => None,
            };
            effects.iter().filter_map(max).collect()
        };
        let effects = idle(&mut it, 0, 40);
        assert_eq!(asks(&effects), [16, 16]);
        assert_eq!(effects[2], Effect::RoomBack { room: 8 });
        assert_eq!(idle(&mut it, 0, 5), [Effect::RoomBack { room: 5 }], "two requests are enough");

        let mut it = thief(&["b", "c"]);
        it.handle_load(at_ms(0), &load("b", 1, 100));
        it.handle_load(at_ms(0), &load("c", 1, 100));
        assert_eq!(asks(&idle(&mut it, 0, 7)), [4, 3]);
    }

    #[test]
    fn suspects_other_boots_and_backlogs_not_worth_the_trip_are_not_asked() {
        let mut it = offered();
        it.handle_transferred(at_ms(50), &boot("b"), 7, Ok(vec![]));
        effects(&mut it);
        // b is 20 ms away: 2 jobs of 10 ms drain as fast, 3 do not.
        it.handle_load(at_ms(1_000), &load("b", 2, 2));
        idle(&mut it, 1_000, 1);
        let first = it.counters().steals_initiated;
        it.handle_offer(at_ms(1_020), &node("b"), 2, offer(2, 0, vec![]));
        effects(&mut it);
        it.handle_load(at_ms(1_100), &load("b", 3, 2));
        it.handle_load(at_ms(1_100), &LoadReport { generation: Generation(2), ..load("b", 4, 50) });
        assert_eq!(effects(&mut it), []);
        let suspect = Member { state: MemberState::Suspect, ..member("b") };
        let event = MembershipEvent::Suspected { epoch: 2, member: suspect };
        it.handle_membership(at_ms(1_150), &event);
        it.handle_load(at_ms(1_200), &load("b", 5, 50));
        assert_eq!(effects(&mut it), []);
        let event = MembershipEvent::Recovered { epoch: 3, member: member("b") };
        it.handle_membership(at_ms(1_250), &event);
        assert_eq!(effects(&mut it), [Effect::WantRoom]);
        assert_eq!(it.counters().steals_initiated, first);
    }

    #[test]
    fn an_idle_node_registers_once_with_its_lifelines_and_is_silent() {
        let mut it = thief(&["b", "c", "d", "e", "f"]);
        let mut order = Vec::new();
        let mut now = idle(&mut it, 0, 8);
        for _ in 0..5 {
            let is_ask = |effect: &&Effect| matches!(effect, Effect::Ask { .. });
            let Some(Effect::Ask { victim, seq, .. }) = now.iter().find(is_ask) else { break };
            order.push(victim.id.to_string());
            it.handle_offer(at_ms(1), &victim.id, *seq, offer(*seq, 0, vec![]));
            now.remove(0);
            now.extend(effects(&mut it));
        }
        assert_eq!(order, ["b", "c", "e"], "1, 2 and 4 places on");
        for ms in 1..10 {
            let mut again = idle(&mut it, ms * 100, 8);
            assert_eq!(again.pop(), Some(Effect::RoomBack { room: 8 }));
            assert_eq!(again, []);
        }
        assert_eq!(it.poll_timeout(), None);
    }

    #[test]
    fn lifelines_wait_while_something_may_come_and_are_asked_again_after_they_gave() {
        let mut it = thief(&["b", "c"]);
        it.handle_load(at_ms(0), &load("b", 1, 1));
        let rest = Effect::RoomBack { room: 2 };
        assert_eq!(idle(&mut it, 0, 3), [ask("b", 1, 3)], "c is not bothered");
        it.handle_offer(at_ms(1), &node("b"), 1, offer(1, 7, vec![job(1)]));
        assert_eq!(effects(&mut it)[1..], [rest], "a transfer is under way");
        it.handle_transferred(at_ms(2), &boot("b"), 7, Ok(vec![moved(1, 2)]));
        let got = pushed(vec![claimed(spec(1), 2)]);
        assert_eq!(effects(&mut it), [got, settle(&[1]), Effect::WantRoom]);
        assert_eq!(idle(&mut it, 3, 2), [ask("b", 2, 1), ask("c", 3, 1)]);
    }

    #[test]
    fn a_peer_that_starts_again_is_another() {
        let mut it = thief(&["b", "c"]);
        idle(&mut it, 0, 2);
        it.handle_offer(at_ms(1), &node("b"), 1, offer(1, 0, vec![]));
        it.handle_offer(at_ms(1), &node("c"), 2, Err(AskError::Unreachable));
        assert_eq!(effects(&mut it).len(), 2, "both rooms come back");
        let again = |name: &str| Member { generation: Generation(2), ..member(name) };
        let event = MembershipEvent::Updated { epoch: 2, member: again("b") };
        it.handle_membership(at_ms(2), &event);
        assert_eq!(effects(&mut it), [Effect::WantRoom], "nobody there remembers this node");
        it.handle_load(at_ms(3), &load("b", 9, 50));
        let asked = Effect::Ask { victim: again("b"), seq: 3, max: 4 };
        assert_eq!(idle(&mut it, 4, 4), [asked]);
        let members = vec![again("c"), member("a")].into();
        it.handle_membership(at_ms(5), &MembershipEvent::Snapshot { epoch: 3, members });
        let freed = Effect::Ask { victim: again("c"), seq: 4, max: 4 };
        assert_eq!(effects(&mut it), [freed], "b is gone, c is no longer avoided");
        it.handle_offer(at_ms(6), &node("c"), 4, offer(4, 7, vec![job(1)]));
        let Effect::Transfer { victim, .. } = &effects(&mut it)[0] else { panic!("a transfer") };
        assert_eq!(victim.generation, Generation(2));
    }

    #[test]
    fn a_hint_is_followed_and_so_is_news_of_a_load() {
        let mut it = thief(&["b"]);
        assert_eq!(idle(&mut it, 0, 8), [ask("b", 1, 8)]);
        it.handle_offer(at_ms(1), &node("b"), 1, offer(1, 0, vec![]));
        assert_eq!(effects(&mut it), [Effect::RoomBack { room: 8 }]);
        it.handle_hint(at_ms(5), &node("b"), 3);
        it.handle_hint(at_ms(6), &node("b"), 6);
        assert_eq!(effects(&mut it), [Effect::WantRoom], "asked once");
        assert_eq!(idle(&mut it, 7, 8), [ask("b", 2, 8)]);
        it.handle_offer(at_ms(8), &node("b"), 2, offer(2, 0, vec![]));
        effects(&mut it);
        it.handle_load(at_ms(9), &load("b", 1, 40));
        assert_eq!(effects(&mut it), [Effect::WantRoom]);
        assert_eq!(idle(&mut it, 10, 0), [], "there is no room, and no hunger");
        it.handle_load(at_ms(11), &load("b", 2, 50));
        assert_eq!(effects(&mut it), []);
    }

    #[test]
    fn an_empty_answer_counts_as_no_load_until_there_is_news() {
        let mut it = thief(&["b"]);
        it.handle_load(at_ms(0), &load("b", 1, 40));
        idle(&mut it, 0, 8);
        let full = Offer { load: Some(load("b", 2, 30)), ..offer(1, 0, vec![]).unwrap() };
        it.handle_offer(at_ms(1), &node("b"), 1, Ok(full));
        assert_eq!(effects(&mut it), [Effect::RoomBack { room: 8 }], "it limits this node's rate");
        it.handle_load(at_ms(2), &load("b", 2, 30));
        assert_eq!(effects(&mut it), []);
        it.handle_load(at_ms(3), &load("b", 3, 30));
        assert_eq!(effects(&mut it), [Effect::WantRoom]);
    }

    #[test]
    fn low_water_covers_the_longest_likely_round_trip() {
        let mut it = thief(&["b", "c"]);
        let own = Load { slots: 4, service_us: 20_000, ..Load::default() };
        it.handle_load(at_ms(0), &load("b", 1, 1_000));
        it.handle_load(at_ms(0), &load("c", 1, 1_000));
        it.handle_idle(at_ms(0), 32, own);
        let low = |it: &mut Thief| -> Vec<usize> {
            let jobs = |effect| match effect {
                Effect::LowWater { jobs } => Some(jobs),
                _ => None,
            };
            effects(it).into_iter().filter_map(jobs).collect()
        };
        assert_eq!(low(&mut it), [], "nothing is measured");
        let seqs = if it.asks[&node("b")].seq == 1 { [1, 2] } else { [2, 1] };
        it.handle_offer(at_ms(50), &node("b"), seqs[0], offer(seqs[0], 1, vec![job(1)]));
        assert_eq!(low(&mut it), [10], "4 slots x 50 ms / 20 ms");
        it.handle_offer(at_ms(400), &node("c"), seqs[1], offer(seqs[1], 1, vec![job(2)]));
        assert_eq!(low(&mut it), [32], "80 is over half of the capacity");
        it.handle_load(at_ms(500), &load("c", 2, 0));
        it.handle_idle(at_ms(500), 0, own);
        assert_eq!(low(&mut it), [10]);
        it.handle_idle(at_ms(500), 0, Load { service_us: 40_000, ..own });
        assert_eq!(low(&mut it), [], "5 is not less than half");
        it.handle_idle(at_ms(500), 0, Load { service_us: 50_000, ..own });
        assert_eq!(low(&mut it), [4]);
        it.handle_load(at_ms(600), &load("b", 2, 0));
        it.handle_idle(at_ms(600), 0, own);
        assert_eq!(low(&mut it), [0]);
    }

    #[test]
    fn many_thieves_do_not_herd() {
        let loads = [load("v", 1, 90), load("w", 1, 100), load("x", 1, 80)];
        let mut asks = BTreeMap::new();
        for n in 0..20 {
            let config = StealConfig { asks_max: 1, ..StealConfig::default() };
            let mut it = with_config(&["v", "w", "x"], config, n);
            for load in &loads {
                it.handle_load(at_ms(0), load);
            }
            for name in asked(&idle(&mut it, 0, 16)) {
                *asks.entry(name.to_owned()).or_insert(0) += 1;
            }
        }
        assert_eq!(asks.values().sum::<i32>(), 20);
        assert!(asks.len() == 3 && asks.values().all(|&n| n <= 14), "{asks:?}");
    }

    proptest! {
        /// Whatever arrives, in whatever order, no room is made or lost, no job is pushed twice,
        /// nobody is asked during a transfer, no one worth asking is forgotten, and what is under way
        /// ends.
        #[test]
        fn room_is_conserved(inputs in prop::collection::vec((0u8..10, 0u8..3, 0u8..8), 1..80)) {
            let mut it = thief(&["b", "c", "d"]);
            let names = ["b", "c", "d"];
            let (mut now, mut version, mut offers, mut lent) = (0, 0, 0, 0);
            let mut open: Vec<(NodeId, u32)> = Vec::new();
            let mut transfers: Vec<(Owner, u64, Vec<Claim>)> = Vec::new();
            let mut pushed = std::collections::BTreeSet::new();
            for (what, who, n) in inputs {
                let name = names[usize::from(who)];
                now += u64::from(n) * 100;
                let was_moving = !it.transfers.is_empty();
                match what {
                    0 => {
                        let room = usize::from(n);
                        lent += room;
                        it.handle_idle(at_ms(now), room, IDLE);
                    }
                    1 => {
                        version += 1;
                        it.handle_load(at_ms(now), &load(name, version, u32::from(n) * 5));
                    }
                    2 => it.handle_hint(at_ms(now), &node(name), u32::from(n)),
                    3 | 4 if !open.is_empty() => {
                        let (victim, seq) = open.remove(usize::from(n) % open.len());
                        let jobs = (0..u64::from(n) % 4).map(|i| job(offers * 10 + i)).collect();
                        offers += 1;
                        let answer = if n == 7 { Err(AskError::TimedOut) } else { offer(seq, offers, jobs) };
                        it.handle_offer(at_ms(now), &victim, seq, answer);
                    }
                    5 | 6 if !transfers.is_empty() => {
                        let (victim, number, claims) = transfers.remove(usize::from(n) % transfers.len());
                        let got = claims.iter().take(usize::from(n)).map(|claim| Moved {
                            claim: Claim { token: claim.token.next(), ..*claim },
                            job: None,
                        });
                        let answer = if n == 7 { Err(TransferError::Unknown) } else { Ok(got.collect()) };
                        it.handle_transferred(at_ms(now), &victim, number, answer);
                    }
                    7 => it.handle_timeout(at_ms(now)),
                    9 if n == 0 => it.clear(),
                    _ => {
                        let state = if n < 4 { MemberState::Dead } else { MemberState::Alive };
                        let member = Member { state, ..member(name) };
                        it.handle_membership(at_ms(now), &MembershipEvent::Updated { epoch: 0, member });
                    }
                }
                for effect in effects(&mut it) {
                    match effect {
                        Effect::Ask { victim, seq, .. } => {
                            prop_assert!(!was_moving && it.transfers.is_empty());
                            open.push((victim.id, seq));
                        }
                        Effect::Transfer { victim, offer, claims, .. } => {
                            transfers.push((victim, offer, claims));
                        }
                        Effect::Push { jobs, .. } => {
                            lent -= jobs.len();
                            for job in jobs {
                                prop_assert!(pushed.insert(job.spec.id));
                            }
                        }
                        Effect::RoomBack { room } => lent -= room,
                        _ => {}
                    }
                }
                let asks: usize = it.asks.values().map(|ask| ask.max).sum();
                prop_assert!(it.asks.len() <= 2 && it.room == 0 && asks <= lent);
                if it.may_ask() && !it.room_wanted && it.asks.len() < 2 {
                    prop_assert_eq!(it.choose(), None);
                }
            }
            it.close();
            while let Some(at) = it.poll_timeout() {
                it.handle_timeout(at);
                for effect in effects(&mut it) {
                    if let Effect::RoomBack { room } = effect {
                        lent -= room;
                    }
                }
            }
            prop_assert_eq!(lent, 0);
        }
    }
}
