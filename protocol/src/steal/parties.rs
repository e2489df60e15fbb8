//! Victims and thieves against a model of the store, on virtual time, with lost and late messages,
//! lost answers, and crashes. From one seed; a failure prints it.
//!
//! While faults last, no token is ever known to two owners and no two runs of a job overlap. Once
//! they end, every job is done, and then nobody sends a steal message any more.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::{AskError, Effect as ThiefEffect, Moved, RateLimit, StealConfig, Thief, TransferError};
use crate::deque::fixtures::{node, spec};
use crate::deque::{DequeConfig, Dispatcher, Effect as DequeEffect, InsertOutcome, Plan, Source};
use crate::id::{FencingToken, Generation, Incarnation, JobId, NodeId, Owner};
use crate::job::{Claim, ClaimedJob, JobSpec};
use crate::load::{Load, LoadReport};
use crate::swim::{Member, MemberState, MembershipEvent};
use crate::time::Instant;
use crate::wire::stream::Offer;

const SLOTS: usize = 2;
const SERVICE: Duration = Duration::from_millis(20);
const TERM: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_secs(1);
/// The last poll is answered well before the end, so that what is lent then is lent for good.
const POLLS_END: Instant = Instant::from_micros(58_000_000);
const GOSSIP: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued,
    Claimed,
    Running,
    Done,
}

#[derive(Clone, Debug)]
struct Row {
    spec: Arc<JobSpec>,
    owner: Option<Owner>,
    token: FencingToken,
    state: State,
}

/// The store: one compare-and-set a claim, and the owner's row unreaped.
#[derive(Default)]
struct Store {
    rows: BTreeMap<JobId, Row>,
    live: BTreeSet<Owner>,
    /// Who was told each token: a second one is a fault.
    told: BTreeMap<(JobId, FencingToken), Owner>,
}

impl Store {
    fn tell(&mut self, owner: &Owner, claim: Claim) {
        let told = self.told.entry((claim.job, claim.token)).or_insert_with(|| owner.clone());
        assert_eq!(told, owner, "two owners hold {claim:?}");
    }

    fn holds(&self, owner: &Owner, claim: Claim, state: State) -> bool {
        let row = &self.rows[&claim.job];
        row.owner.as_ref() == Some(owner) && row.token == claim.token && row.state == state
    }

    fn give(&mut self, job: JobId, to: &Owner) -> ClaimedJob {
        let row = self.rows.get_mut(&job).unwrap();
        (row.owner, row.state) = (Some(to.clone()), State::Claimed);
        row.token = row.token.next();
        let (spec, token) = (Arc::clone(&row.spec), row.token);
        self.tell(to, Claim { job, token });
        ClaimedJob { spec, token, attempt: 1 }
    }

    fn insert(&mut self, owner: &Owner, spec: &Arc<JobSpec>, claim: bool) -> InsertOutcome {
        let row = Row {
            spec: Arc::clone(spec),
            owner: None,
            token: FencingToken(0),
            state: State::Queued,
        };
        if self.rows.insert(spec.id, row).is_some() {
            panic!("jobs are inserted once");
        }
        if claim && self.live.contains(owner) {
            InsertOutcome::Claimed(self.give(spec.id, owner).token)
        } else {
            InsertOutcome::Unclaimed
        }
    }

    fn claim(&mut self, owner: &Owner, max: usize) -> Vec<ClaimedJob> {
        if !self.live.contains(owner) {
            return Vec::new();
        }
        let queued = |row: &&Row| row.state == State::Queued;
        let ids: Vec<JobId> = self.rows.values().filter(queued).map(|row| row.spec.id).collect();
        ids.into_iter().take(max).map(|job| self.give(job, owner)).collect()
    }

    /// Moves the claims that `from` holds unstarted: a transfer, a retake, a readoption.
    fn take(&mut self, from: &Owner, to: &Owner, claims: &[Claim]) -> Vec<ClaimedJob> {
        let held = |store: &Self, claim: &Claim| {
            store.live.contains(to) && store.holds(from, *claim, State::Claimed)
        };
        let moved: Vec<Claim> = claims.iter().filter(|claim| held(self, claim)).copied().collect();
        moved.into_iter().map(|claim| self.give(claim.job, to)).collect()
    }

    fn unstarted(&self, owner: &Owner) -> Vec<Claim> {
        self.rows
            .values()
            .filter(|row| row.owner.as_ref() == Some(owner) && row.state == State::Claimed)
            .map(|row| Claim { job: row.spec.id, token: row.token })
            .collect()
    }

    fn start(&mut self, owner: &Owner, claim: Claim) -> bool {
        let may = self.live.contains(owner) && self.holds(owner, claim, State::Claimed);
        if may {
            assert_eq!(self.told[&(claim.job, claim.token)], *owner);
            self.rows.get_mut(&claim.job).unwrap().state = State::Running;
        }
        may
    }

    fn finish(&mut self, owner: &Owner, claim: Claim) {
        assert!(self.holds(owner, claim, State::Running), "no run of a live owner is taken over");
        self.rows.get_mut(&claim.job).unwrap().state = State::Done;
    }

    fn reap(&mut self, owner: &Owner) {
        self.live.remove(owner);
        for row in self.rows.values_mut() {
            let open = matches!(row.state, State::Claimed | State::Running);
            if open && row.owner.as_ref() == Some(owner) {
                (row.owner, row.state) = (None, State::Queued);
                row.token = row.token.next();
            }
        }
    }

    fn all_done(&self) -> bool {
        self.rows.values().all(|row| row.state == State::Done)
    }
}

#[derive(Debug)]
enum Call {
    Insert(Vec<(Arc<JobSpec>, Plan)>),
    /// The room that the deque lent.
    Claim(usize),
    Start(Claim),
    Transfer(Owner, u64, Vec<Claim>),
    ReadBack(Owner, u64),
    Retake(u64, Vec<Claim>),
}

#[derive(Debug)]
enum Answer {
    Inserted(Vec<(Arc<JobSpec>, Plan, InsertOutcome)>),
    Claimed(usize, Vec<ClaimedJob>),
    Started(Claim, bool),
    Transferred(Owner, u64, Result<Vec<Moved>, TransferError>),
    Held(Owner, u64, Result<Vec<Claim>, TransferError>),
    Retaken(u64, Option<Vec<Claim>>),
}

#[derive(Debug)]
enum Message {
    Request { seq: u32, max: u32 },
    Offer(Offer),
    Failed(u32),
    Settle(u64, Vec<JobId>),
    Hint(u32),
    Load(LoadReport),
}

#[derive(Debug)]
enum Event {
    Deliver(Owner, Owner, Message),
    Call(Owner, Call),
    Answer(Owner, Answer),
    Ended(Owner, Claim),
    Timer(Owner),
    Gossip(Owner),
    Poll(Owner),
    Term(Owner),
    Enqueue(usize, u64),
    Crash(usize),
    /// A crash is noticed: the lease is reaped, and the node starts again.
    Restart(usize),
}

struct Queued(Instant, u64, Event);

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

struct Node {
    owner: Owner,
    up: bool,
    deque: Dispatcher,
    thief: Thief,
    limit: RateLimit,
    running: BTreeSet<Claim>,
    version: u64,
    told: Load,
}

struct World {
    rng: fastrand::Rng,
    now: Instant,
    /// Percent of messages and of store answers that are lost, while faults last.
    loss: u32,
    calm_from: Instant,
    events: BinaryHeap<Reverse<Queued>>,
    queued: u64,
    nodes: Vec<Node>,
    store: Store,
    made: u64,
    /// When the last steal message was sent.
    last_steal: Instant,
    stolen: usize,
    runs: BTreeMap<JobId, usize>,
}

fn member(owner: &Owner, state: MemberState) -> Member {
    let addr = "127.0.0.1:1".parse().unwrap();
    Member {
        id: owner.node.clone(),
        generation: owner.generation,
        incarnation: Incarnation(0),
        state,
        gossip: addr,
        steal: addr,
    }
}

impl World {
    fn new(seed: u64, nodes: usize, loss: u32, calm_from: Instant) -> Self {
        let mut this = Self {
            rng: fastrand::Rng::with_seed(seed),
            now: Instant::ZERO,
            loss,
            calm_from,
            events: BinaryHeap::new(),
            queued: 0,
            nodes: Vec::new(),
            store: Store::default(),
            made: 0,
            last_steal: Instant::ZERO,
            stolen: 0,
            runs: BTreeMap::new(),
        };
        for n in 0..nodes {
            let owner = Owner { node: node(&format!("n{n}")), generation: Generation(1) };
            let node = this.boot(owner);
            this.nodes.push(node);
        }
        for n in 0..nodes {
            this.introduce(n);
        }
        this
    }

    fn boot(&mut self, owner: Owner) -> Node {
        self.store.live.insert(owner.clone());
        for (event, every) in [
            (Event::Gossip(owner.clone()), GOSSIP),
            (Event::Poll(owner.clone()), POLL),
            (Event::Term(owner.clone()), TERM),
        ] {
            let jitter = self.rng.u64(..u64::try_from(every.as_micros()).unwrap());
            self.at(self.now + Duration::from_micros(jitter), event);
        }
        let config =
            DequeConfig { offer_expiry: Duration::from_millis(800), ..DequeConfig::default() };
        let seed = self.rng.u64(..);
        Node {
            deque: Dispatcher::new(owner.node.clone(), config),
            thief: Thief::new(owner.node.clone(), StealConfig::default(), seed),
            limit: RateLimit::new(10),
            running: BTreeSet::new(),
            version: 0,
            told: Load::default(),
            up: true,
            owner,
        }
    }

    /// The node learns who lives, and its executors grant their credits.
    fn introduce(&mut self, n: usize) {
        let present = |node: &&Node| node.up;
        let members =
            self.nodes.iter().filter(present).map(|n| member(&n.owner, MemberState::Alive));
        let event = MembershipEvent::Snapshot { epoch: 1, members: members.collect() };
        let now = self.now;
        self.nodes[n].thief.handle_membership(now, &event);
        self.nodes[n].deque.credit(now, SLOTS + 1);
        self.follow(n);
    }

    fn at(&mut self, at: Instant, event: Event) {
        self.queued += 1;
        assert!(self.queued < 200_000, "a storm of messages");
        self.events.push(Reverse(Queued(at, self.queued, event)));
    }

    fn is_calm(&self) -> bool {
        self.now >= self.calm_from
    }

    fn is_lost(&mut self) -> bool {
        !self.is_calm() && self.rng.u32(..100) < self.loss
    }

    /// Mostly short; while faults last, now and then longer than any time-out.
    fn delay(&mut self, usual_us: u64) -> Duration {
        let slow = !self.is_calm() && self.rng.u32(..100) < self.loss / 2;
        Duration::from_micros(self.rng.u64(..if slow { 4_000_000 } else { usual_us }))
    }

    fn send(&mut self, from: &Owner, to: &NodeId, message: Message) {
        let Some(to) = self.nodes.iter().find(|n| n.owner.node == *to).map(|n| n.owner.clone())
        else {
            return;
        };
        if !matches!(message, Message::Load(_)) {
            self.last_steal = self.now;
        }
        if self.is_lost() {
            return;
        }
        let at = self.now + self.delay(5_000);
        self.at(at, Event::Deliver(from.clone(), to, message));
    }

    fn call(&mut self, owner: &Owner, call: Call) {
        let at = self.now + self.delay(2_000);
        self.at(at, Event::Call(owner.clone(), call));
    }

    fn index(&self, owner: &Owner) -> Option<usize> {
        self.nodes.iter().position(|node| node.up && node.owner == *owner)
    }

    fn load(&mut self, n: usize) -> Load {
        let node = &mut self.nodes[n];
        let load = Load {
            version: 0,
            stealable: u32::try_from(node.deque.stealable()).unwrap(),
            queued: u32::try_from(node.deque.queued()).unwrap(),
            running: u32::try_from(node.running.len()).unwrap(),
            slots: u32::try_from(SLOTS).unwrap(),
            service_us: u32::try_from(SERVICE.as_micros()).unwrap(),
        };
        if load != node.told {
            (node.told, node.version) = (load, node.version + 1);
        }
        Load { version: node.version, ..load }
    }

    fn report(&mut self, n: usize) -> LoadReport {
        let load = self.load(n);
        let Owner { node, generation } = self.nodes[n].owner.clone();
        LoadReport { node, generation, load, age_ms: 0 }
    }

    /// Carries out what the machines of node `n` want.
    fn follow(&mut self, n: usize) {
        let owner = self.nodes[n].owner.clone();
        for effects in 0.. {
            assert!(effects < 10_000, "a storm within one node");
            if let Some(effect) = self.nodes[n].deque.poll_effect() {
                self.follow_deque(n, &owner, effect);
            } else if let Some(effect) = self.nodes[n].thief.poll_effect() {
                self.follow_thief(n, &owner, effect);
            } else {
                break;
            }
        }
        let node = &self.nodes[n];
        let timers = [node.deque.poll_timeout(), node.thief.poll_timeout()];
        for at in timers.into_iter().flatten() {
            self.at(at.max(self.now), Event::Timer(owner.clone()));
        }
    }

    fn follow_deque(&mut self, n: usize, owner: &Owner, effect: DequeEffect) {
        match effect {
            DequeEffect::Run { entry, .. } => self.call(owner, Call::Start(entry.job.claim())),
            DequeEffect::Idle { room } => self.call(owner, Call::Claim(room)),
            DequeEffect::Retake { offer, claims } => {
                self.call(owner, Call::Retake(offer, claims));
            }
            DequeEffect::Hint { thief, stealable } => {
                self.send(owner, &thief, Message::Hint(stealable));
            }
            DequeEffect::NudgeSelf => self.poll(n),
            DequeEffect::Nudge { .. } | DequeEffect::Release { .. } => {
                panic!("no job has a key, and no deque is closed")
            }
        }
    }

    fn poll(&mut self, n: usize) {
        let room = self.nodes[n].deque.lend();
        if room > 0 {
            let owner = self.nodes[n].owner.clone();
            self.call(&owner, Call::Claim(room));
        }
    }

    fn follow_thief(&mut self, n: usize, owner: &Owner, effect: ThiefEffect) {
        let now = self.now;
        match effect {
            ThiefEffect::Ask { victim, seq, max } => {
                self.send(owner, &victim.id, Message::Request { seq, max });
            }
            ThiefEffect::Transfer { victim, offer, claims, .. } => {
                self.call(owner, Call::Transfer(victim, offer, claims));
            }
            ThiefEffect::ReadBack { victim, offer, .. } => {
                self.call(owner, Call::ReadBack(victim, offer));
            }
            ThiefEffect::Settle { victim, offer, taken } => {
                self.send(owner, &victim, Message::Settle(offer, taken));
            }
            ThiefEffect::Push { jobs, .. } => {
                self.stolen += jobs.len();
                let jobs = jobs.into_iter().map(|job| (job, false)).collect();
                self.nodes[n].deque.push_sorted(now, jobs, Source::Stolen);
            }
            ThiefEffect::RoomBack { room } => self.nodes[n].deque.handle_room_back(room),
            ThiefEffect::WantRoom => {
                let room = self.nodes[n].deque.lend();
                let load = self.load(n);
                self.nodes[n].thief.handle_idle(now, room, load);
            }
            ThiefEffect::LowWater { jobs } => self.nodes[n].deque.set_low_water(jobs),
        }
    }

    fn step(&mut self) -> bool {
        let Some(Reverse(Queued(at, _, event))) = self.events.pop() else { return false };
        self.now = at;
        match event {
            Event::Deliver(from, to, message) => {
                if let Some(n) = self.index(&to) {
                    self.deliver(n, &from, message);
                    self.follow(n);
                } else if let Message::Request { seq, .. } = message {
                    self.send(&to, &from.node, Message::Failed(seq));
                }
            }
            Event::Call(owner, call) => {
                let answer = self.answer(&owner, call);
                let at = self.now + self.delay(2_000);
                self.at(at, Event::Answer(owner, answer));
            }
            Event::Answer(owner, answer) => {
                if let Some(n) = self.index(&owner) {
                    self.take_answer(n, answer);
                    self.follow(n);
                }
            }
            Event::Ended(owner, claim) => {
                if let Some(n) = self.index(&owner) {
                    self.nodes[n].running.remove(&claim);
                    self.store.finish(&owner, claim);
                    self.nodes[n].deque.credit(self.now, 1);
                    self.follow(n);
                }
            }
            Event::Timer(owner) => {
                if let Some(n) = self.index(&owner) {
                    let node = &mut self.nodes[n];
                    let due = |at: Option<Instant>| at.is_some_and(|at| at <= self.now);
                    if due(node.deque.poll_timeout()) || due(node.thief.poll_timeout()) {
                        node.deque.handle_timeout(self.now);
                        node.thief.handle_timeout(self.now);
                        self.follow(n);
                    }
                }
            }
            Event::Gossip(owner) => {
                if let Some(n) = self.index(&owner) {
                    let report = self.report(n);
                    let others: Vec<NodeId> =
                        self.nodes.iter().map(|node| node.owner.node.clone()).collect();
                    for other in others.iter().filter(|other| **other != owner.node) {
                        self.send(&owner, other, Message::Load(report.clone()));
                    }
                    self.at(self.now + GOSSIP, Event::Gossip(owner));
                }
            }
            Event::Poll(owner) => {
                if let Some(n) = self.index(&owner) {
                    self.poll(n);
                    self.follow(n);
                    if self.now < POLLS_END {
                        self.at(self.now + POLL, Event::Poll(owner));
                    }
                }
            }
            Event::Term(owner) => {
                if let Some(n) = self.index(&owner) {
                    self.readopt(n);
                    self.follow(n);
                    self.at(self.now + TERM, Event::Term(owner));
                }
            }
            Event::Enqueue(n, jobs) => {
                if self.nodes[n].up {
                    let specs: Vec<Arc<JobSpec>> =
                        (1..=jobs).map(|i| Arc::new(spec(self.made + i))).collect();
                    self.made += jobs;
                    let node = &mut self.nodes[n];
                    let owner = node.owner.clone();
                    let plans = node.deque.plan_insert(&specs, |_| owner.node.clone(), 0);
                    self.call(&owner, Call::Insert(specs.into_iter().zip(plans).collect()));
                }
            }
            Event::Crash(n) => self.crash(n),
            Event::Restart(n) => self.restart(n),
        }
        true
    }

    fn deliver(&mut self, n: usize, from: &Owner, message: Message) {
        let now = self.now;
        match message {
            Message::Request { seq, max } => {
                let allowed = self.nodes[n].limit.allow(now, &from.node);
                let max = if allowed { max as usize } else { 0 };
                let plan = self.nodes[n].deque.surrender(now, from, max);
                let report = self.report(n);
                let owner = self.nodes[n].owner.clone();
                let offer = plan.into_frame(seq, Some(report));
                self.send(&owner, &from.node, Message::Offer(offer));
            }
            Message::Offer(offer) => {
                let seq = offer.seq;
                self.nodes[n].thief.handle_offer(now, &from.node, seq, Ok(offer));
            }
            Message::Failed(seq) => {
                let failed = Err(AskError::Unreachable);
                self.nodes[n].thief.handle_offer(now, &from.node, seq, failed);
            }
            Message::Settle(offer, taken) => {
                self.nodes[n].deque.settle(now, from, offer, &taken);
            }
            Message::Hint(stealable) => {
                self.nodes[n].thief.handle_hint(now, &from.node, stealable);
            }
            Message::Load(report) => self.nodes[n].thief.handle_load(now, &report),
        }
    }

    /// What the store does at once, and what its caller hears of it: of these calls the answer may
    /// be lost, though the work is done.
    fn answer(&mut self, owner: &Owner, call: Call) -> Answer {
        match call {
            Call::Insert(jobs) => {
                let insert = |(spec, plan): (Arc<JobSpec>, Plan)| {
                    let outcome = self.store.insert(owner, &spec, plan.claim);
                    (spec, plan, outcome)
                };
                Answer::Inserted(jobs.into_iter().map(insert).collect())
            }
            Call::Claim(room) => Answer::Claimed(room, self.store.claim(owner, room.min(16))),
            Call::Start(claim) => Answer::Started(claim, self.store.start(owner, claim)),
            Call::Transfer(from, offer, claims) => {
                let moved = self.store.take(&from, owner, &claims);
                let moved = moved.iter().map(|job| Moved { claim: job.claim(), job: None });
                let lost = self.is_lost();
                let answer = if lost { Err(TransferError::Unknown) } else { Ok(moved.collect()) };
                Answer::Transferred(from, offer, answer)
            }
            Call::ReadBack(from, offer) => {
                let held = self.store.unstarted(owner);
                let lost = self.is_lost();
                Answer::Held(from, offer, if lost { Err(TransferError::Unknown) } else { Ok(held) })
            }
            Call::Retake(offer, claims) => {
                let held = self.store.take(owner, owner, &claims);
                let lost = self.is_lost();
                let held = held.iter().map(ClaimedJob::claim).collect();
                Answer::Retaken(offer, (!lost).then_some(held))
            }
        }
    }

    fn take_answer(&mut self, n: usize, answer: Answer) {
        let now = self.now;
        let load = self.load(n);
        let node = &mut self.nodes[n];
        match answer {
            Answer::Inserted(inserted) => node.deque.handle_inserted(now, inserted),
            Answer::Claimed(room, jobs) => {
                let rest = room - jobs.len();
                if jobs.len() < room.min(16) {
                    node.deque.spill_drained();
                }
                let jobs = jobs.into_iter().map(|job| (job, true)).collect();
                node.deque.push_sorted(now, jobs, Source::Claimed);
                if rest > 0 {
                    node.thief.handle_idle(now, rest, load);
                }
            }
            Answer::Started(claim, true) => {
                *self.runs.entry(claim.job).or_default() += 1;
                node.running.insert(claim);
                let owner = node.owner.clone();
                let others = self.nodes.iter().flat_map(|node| node.running.iter());
                assert_eq!(others.filter(|c| c.job == claim.job).count(), 1, "two runs overlap");
                self.at(now + SERVICE, Event::Ended(owner, claim));
            }
            Answer::Started(_, false) => node.deque.credit(now, 1),
            Answer::Transferred(victim, offer, moved) => {
                node.thief.handle_transferred(now, &victim, offer, moved);
            }
            Answer::Held(victim, offer, held) => {
                node.thief.handle_read_back(now, &victim, offer, held);
            }
            Answer::Retaken(offer, held) => {
                node.deque.handle_retaken(now, offer, held.as_deref());
            }
        }
    }

    /// Takes up claims that a lost answer hid from the node. Those on their way to it are taken up
    /// too, a token later: what arrives then is stale, and never starts.
    fn readopt(&mut self, n: usize) {
        let owner = self.nodes[n].owner.clone();
        let unknown: Vec<Claim> = self
            .store
            .unstarted(&owner)
            .into_iter()
            .filter(|claim| !self.nodes[n].deque.knows(&claim.job))
            .collect();
        let jobs = self.store.take(&owner, &owner, &unknown);
        let jobs = jobs.into_iter().map(|job| (job, false)).collect();
        self.nodes[n].deque.push_sorted(self.now, jobs, Source::Readopted);
    }

    fn crash(&mut self, n: usize) {
        if self.nodes[n].up {
            self.nodes[n].up = false;
            self.nodes[n].running.clear();
            self.at(self.now + TERM, Event::Restart(n));
            self.announce(n, MemberState::Suspect);
        }
    }

    fn restart(&mut self, n: usize) {
        self.announce(n, MemberState::Dead);
        let Owner { node, generation } = self.nodes[n].owner.clone();
        self.store.reap(&self.nodes[n].owner);
        let booted = self.boot(Owner { node, generation: generation.next() });
        self.nodes[n] = booted;
        self.introduce(n);
        self.announce(n, MemberState::Alive);
    }

    fn announce(&mut self, n: usize, state: MemberState) {
        let member = member(&self.nodes[n].owner, state);
        for other in 0..self.nodes.len() {
            if other != n && self.nodes[other].up {
                let event = MembershipEvent::Updated { epoch: 0, member: member.clone() };
                self.nodes[other].thief.handle_membership(self.now, &event);
                if state == MemberState::Dead {
                    self.nodes[other].deque.forget(&member.id);
                }
                self.follow(other);
            }
        }
    }

    fn run_until(&mut self, end: Instant) {
        while self.events.peek().is_some_and(|Reverse(next)| next.0 <= end) {
            self.step();
        }
        self.now = end;
    }
}

fn seconds(s: u64) -> Instant {
    Instant::from_micros(s * 1_000_000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_job_is_lost_and_none_has_two_owners(
        seed: u64,
        nodes in 2usize..4,
        loss in 0u32..40,
        crashes in 0usize..4,
    ) {
        let mut world = World::new(seed, nodes, loss, seconds(10));
        for _ in 0..12 {
            let at = Instant::from_micros(world.rng.u64(..10_000_000));
            let burst = world.rng.u64(1..80);
            let n = if world.rng.u32(..4) == 0 { world.rng.usize(..nodes) } else { 0 };
            world.at(at, Event::Enqueue(n, burst));
        }
        for _ in 0..crashes {
            let at = Instant::from_micros(world.rng.u64(..10_000_000));
            let n = world.rng.usize(..nodes);
            world.at(at, Event::Crash(n));
        }
        world.run_until(seconds(60));
        prop_assert!(world.store.all_done(), "jobs were lost");
        for node in &world.nodes {
            let left = (node.deque.queued(), node.deque.in_transit(), node.deque.lent());
            prop_assert_eq!(left, (0, 0, 0), "{} keeps something", node.owner);
            prop_assert_eq!(node.deque.reserved(), 0);
            prop_assert_eq!(node.deque.credits(), SLOTS + 1);
        }
        prop_assert!(world.last_steal < seconds(50), "an idle mesh sends no steal traffic");
        if crashes == 0 {
            prop_assert!(world.runs.values().all(|&runs| runs == 1));
        }
    }
}

#[test]
fn idle_nodes_take_their_share_of_a_burst() {
    let mut world = World::new(1, 3, 0, Instant::ZERO);
    world.run_until(seconds(1));
    // As many as the deque's room holds when half of it may be lent: the store is left out of it.
    for _ in 0..6 {
        world.at(seconds(1), Event::Enqueue(0, 10));
    }
    world.run_until(seconds(3));
    assert!(world.store.all_done());
    assert!(world.stolen >= 20, "{} of 60 were stolen", world.stolen);
    assert!(world.runs.len() == 60 && world.runs.values().all(|&runs| runs == 1));
}
