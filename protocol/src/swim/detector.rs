//! The probe cycle: whom to ping, what an answer or its absence means, what to tell along the way.
//!
//! Invariants: a verdict is given only on a round in which this node's own timers were on time; an
//! answer counts only if the probed boot gave it; every datagram is filled by measure and never
//! above its budget; a datagram to a member that is thought to be anything but alive carries that
//! record first.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;
use std::time::Duration;

use crate::id::{Generation, Incarnation, NodeId};
use crate::limits::{RELAYS_MAX, STRANGER_REPLIES_MAX};
use crate::load::{Load, LoadReport, LoadTable};
use crate::swim::dissemination::{Queue, send_limit};
use crate::swim::health::{Health, is_late};
use crate::swim::suspicion::{self, Suspicions};
use crate::swim::{Changed, Heard, Member, MemberState, SwimConfig, Verdict};
use crate::time::Instant;
use crate::wire::datagram::{Body, Datagram, Sender, Writer};

/// Members that are told of a departure at once, and again each period while the node still runs.
const LEAVE_FANOUT: usize = 8;

/// A load older than this is not passed on: the work that it speaks of is done or was stolen.
const LOAD_AGE_MAX: Duration = Duration::from_secs(10);

/// Members whose loads are looked up for one datagram, whether or not there is one to pass on.
const LOADS_LOOKED_AT_MAX: usize = 64;

/// What the detector asks of its surroundings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// Send this message, with the clear header before it, as one datagram.
    Transmit {
        /// Where to.
        to: SocketAddr,
        /// As [`Writer::finish`] made it.
        message: Vec<u8>,
    },
    /// Tell members what was heard.
    Heard(Heard),
    /// Tell members what a probe or a suspicion came to.
    Verdict(Verdict),
    /// Ask [`Ask::Ping`](crate::swim::Ask::Ping) of the target by stream; answer with
    /// [`Detector::handle_stream_ping`].
    StreamPing {
        /// Names the request in the answer.
        id: u64,
        /// Where to.
        to: SocketAddr,
        /// Who should answer.
        target: NodeId,
    },
}

/// What the detector has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Probes begun.
    pub probes: u64,
    /// Probes that the target answered, by whatever way.
    pub probes_answered: u64,
    /// Probes answered by stream alone: datagrams to that member are lost.
    pub probes_answered_by_stream: u64,
    /// Probes that ended in a verdict.
    pub probes_failed: u64,
    /// Rounds that accused nobody because this node's own timers were late.
    pub rounds_voided: u64,
    /// Pings meant for another id.
    pub pings_misaddressed: u64,
    /// Pings of strangers left unanswered because there were too many.
    pub stranger_replies_withheld: u64,
    /// Indirect probes not made: of a stranger, or too many at once.
    pub relays_refused: u64,
    /// Answers that no pending probe asked for.
    pub answers_unexpected: u64,
    /// Datagrams that came from this very boot.
    pub echoes: u64,
}

/// The failure detector of one node.
///
/// Call order: [`Detector::start`] once, then any `handle_*`; after each, [`Detector::poll_effect`]
/// until `None`, then [`Detector::poll_timeout`]. [`Detector::set_load`] may come before any of them.
#[derive(Debug)]
pub struct Detector {
    config: SwimConfig,
    me: Member,
    rng: fastrand::Rng,
    /// Everybody else, as members last said.
    peers: BTreeMap<NodeId, Member>,
    present: usize,
    round: Round,
    probe: Option<Probe>,
    relays: BTreeMap<u32, Relay>,
    suspicions: Suspicions,
    queue: Queue,
    health: Health,
    load: Option<Load>,
    loads: LoadTable,
    load_cursor: Option<NodeId>,
    period_at: Option<Instant>,
    stranger_replies: u32,
    seq: u32,
    stream_id: u64,
    counters: Counters,
    effects: VecDeque<Effect>,
}

/// A shuffled order of the present members, each probed once before it is shuffled again.
#[derive(Debug, Default)]
struct Round {
    order: Vec<NodeId>,
    next: usize,
}

#[derive(Debug)]
struct Probe {
    seq: u32,
    target: NodeId,
    generation: Generation,
    incarnation: Incarnation,
    addr: SocketAddr,
    /// When others are asked; `None` once they were.
    indirect_at: Option<Instant>,
    stream: Option<u64>,
    helpers: usize,
    nacks: usize,
}

#[derive(Debug)]
struct Relay {
    asker: NodeId,
    asker_addr: SocketAddr,
    asker_seq: u32,
    target: NodeId,
    /// When the asker is told that there is no answer so far; `None` once it was.
    nack_at: Option<Instant>,
    ends: Instant,
}

impl Round {
    /// Puts a new member at a random place among those still to be probed.
    fn insert(&mut self, rng: &mut fastrand::Rng, id: NodeId) {
        let at = rng.usize(self.next..=self.order.len());
        self.order.insert(at, id);
    }

    fn remove(&mut self, id: &NodeId) {
        if let Some(at) = self.order.iter().position(|other| other == id) {
            self.order.remove(at);
            if at < self.next {
                self.next -= 1;
            }
        }
    }

    fn advance(&mut self, rng: &mut fastrand::Rng) -> Option<NodeId> {
        if self.next == self.order.len() {
            rng.shuffle(&mut self.order);
            self.next = 0;
        }
        let id = self.order.get(self.next)?.clone();
        self.next += 1;
        Some(id)
    }
}

impl Detector {
    /// A detector for `me`, with its randomness from `seed`. It does nothing before
    /// [`Detector::start`].
    pub fn new(config: SwimConfig, me: Member, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let seq = rng.u32(..);
        Self {
            config,
            me,
            rng,
            peers: BTreeMap::new(),
            present: 0,
            round: Round::default(),
            probe: None,
            relays: BTreeMap::new(),
            suspicions: Suspicions::default(),
            queue: Queue::default(),
            health: Health::default(),
            load: None,
            loads: LoadTable::default(),
            load_cursor: None,
            period_at: None,
            stranger_replies: 0,
            seq,
            stream_id: 0,
            counters: Counters::default(),
            effects: VecDeque::new(),
        }
    }

    /// Begins to probe, at a random point within the first period.
    pub fn start(&mut self, now: Instant) {
        let phase = self.rng.u64(0..=crate::time::micros(self.config.protocol_period));
        self.period_at = Some(now + Duration::from_micros(phase));
    }

    /// This node's own load, for the datagrams built from now on.
    pub fn set_load(&mut self, load: Load) {
        self.load = Some(load);
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// How well this node trusts itself.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Updates still to be spread.
    pub fn queued_updates(&self) -> usize {
        self.queue.len()
    }

    /// Indirect probes under way for others.
    pub fn open_relays(&self) -> usize {
        self.relays.len()
    }

    /// Takes in records from members.
    pub fn handle_changed(&mut self, now: Instant, changed: Changed) {
        self.notice_lateness(now);
        for id in &changed.forgotten {
            self.remove(id);
        }
        for member in changed.members {
            if member.id == self.me.id {
                self.adopt_own(now, member);
            } else {
                self.adopt(now, member);
            }
        }
    }

    fn adopt_own(&mut self, now: Instant, member: Member) {
        if member.boot() == self.me.boot() && member.incarnation > self.me.incarnation {
            self.health.accused();
        }
        let leaves = member.state == MemberState::Left && self.me.state != MemberState::Left;
        self.me = member;
        if leaves {
            self.announce_leave(now);
        }
    }

    fn adopt(&mut self, now: Instant, member: Member) {
        let id = member.id.clone();
        let was_present = self.peers.get(&id).is_some_and(Member::is_present);
        match (was_present, member.is_present()) {
            (false, true) => {
                self.present += 1;
                self.round.insert(&mut self.rng, id.clone());
            }
            (true, false) => {
                self.present -= 1;
                self.round.remove(&id);
                self.loads.remove(&id);
            }
            _ => {}
        }
        if let Some(probe) = self.probe.as_ref().filter(|p| p.target == id)
            && (!member.is_present()
                || (member.generation, member.incarnation) != (probe.generation, probe.incarnation))
        {
            self.probe = None;
        }
        self.peers.insert(id.clone(), member.clone());
        if member.state == MemberState::Suspect {
            let lasts = suspicion::timeout(
                self.config.suspicion_multiplier,
                self.members(),
                self.config.protocol_period,
            );
            self.suspicions.start(&member, now + lasts);
        } else {
            self.suspicions.stop(&id);
        }
        self.queue.push(member);
    }

    fn remove(&mut self, id: &NodeId) {
        if self.peers.remove(id).is_some_and(|m| m.is_present()) {
            self.present -= 1;
            self.round.remove(id);
        }
        if self.probe.as_ref().is_some_and(|p| p.target == *id) {
            self.probe = None;
        }
        self.suspicions.stop(id);
        self.queue.forget(id);
        self.loads.remove(id);
    }

    /// Present members, this node included.
    fn members(&self) -> usize {
        self.present + 1
    }

    /// Takes in a datagram. Bodies that are not about membership are ignored; what they carry along
    /// is heard all the same.
    pub fn handle_datagram(&mut self, now: Instant, from: SocketAddr, datagram: Datagram) {
        self.notice_lateness(now);
        let Datagram { from: sender, body, updates, loads } = datagram;
        if sender.node == self.me.id && sender.generation == self.me.generation {
            self.counters.echoes += 1;
            return;
        }
        self.hear(now, updates, loads);
        match body {
            Body::Ping { seq, to } => self.answer_ping(now, from, &sender, seq, &to),
            Body::Ack { seq } => self.take_ack(now, seq, &sender),
            Body::AckRelay { seq, target } => self.take_answer(seq, &target),
            Body::Nack { seq } => self.take_nack(seq),
            Body::PingReq { seq, target, addr } => {
                self.begin_relay(now, from, sender, seq, &target, addr);
            }
            _ => {}
        }
    }

    /// Passes on to members what they do not know yet.
    fn hear(&mut self, now: Instant, mut updates: Vec<Member>, mut loads: Vec<LoadReport>) {
        updates.retain(|update| {
            let known =
                if update.id == self.me.id { Some(&self.me) } else { self.peers.get(&update.id) };
            known.is_none_or(|known| known.precedence() < update.precedence())
        });
        loads.retain(|report| {
            self.peers.get(&report.node).is_some_and(Member::is_present)
                && self.loads.observe(now, report)
        });
        if !updates.is_empty() || !loads.is_empty() {
            self.effects.push_back(Effect::Heard(Heard { updates, loads }));
        }
    }

    fn answer_ping(
        &mut self,
        now: Instant,
        from: SocketAddr,
        sender: &Sender,
        seq: u32,
        to: &NodeId,
    ) {
        if *to != self.me.id {
            self.counters.pings_misaddressed += 1;
            return;
        }
        let stranger = !self.peers.get(&sender.node).is_some_and(Member::is_present);
        if stranger {
            if self.stranger_replies == STRANGER_REPLIES_MAX {
                self.counters.stranger_replies_withheld += 1;
                return;
            }
            self.stranger_replies += 1;
        }
        let news = if stranger { News::None } else { News::All };
        self.transmit(now, from, &sender.node, Some(sender.generation), Body::Ack { seq }, news);
    }

    fn take_ack(&mut self, now: Instant, seq: u32, sender: &Sender) {
        match self.relays.get(&seq) {
            Some(relay) if relay.target == sender.node => {
                let relay = self.relays.remove(&seq).expect("it was just looked up");
                let body = Body::AckRelay { seq: relay.asker_seq, target: sender.clone() };
                self.transmit(now, relay.asker_addr, &relay.asker, None, body, News::All);
            }
            _ => self.take_answer(seq, sender),
        }
    }

    /// An answer ends the probe if it comes from the probed id. An older boot than the probed one
    /// proves nothing; a newer one means that the probed boot is over, which its own record tells.
    fn take_answer(&mut self, seq: u32, by: &Sender) {
        match &self.probe {
            Some(probe)
                if probe.seq == seq
                    && probe.target == by.node
                    && probe.generation <= by.generation =>
            {
                self.probe = None;
                self.counters.probes_answered += 1;
                self.health.probe_answered();
            }
            _ => self.counters.answers_unexpected += 1,
        }
    }

    fn take_nack(&mut self, seq: u32) {
        match &mut self.probe {
            Some(probe) if probe.seq == seq && probe.nacks < probe.helpers => probe.nacks += 1,
            _ => self.counters.answers_unexpected += 1,
        }
    }

    /// Pings `target` for a member that got no answer. Only members may ask: a stranger could make
    /// this node send datagrams to anyone.
    fn begin_relay(
        &mut self,
        now: Instant,
        from: SocketAddr,
        asker: Sender,
        seq: u32,
        target: &NodeId,
        addr: SocketAddr,
    ) {
        let is_member = self.peers.get(&asker.node).is_some_and(Member::is_present);
        if !is_member || self.relays.len() >= RELAYS_MAX || *target == self.me.id {
            self.counters.relays_refused += 1;
            return;
        }
        let period = self.config.protocol_period;
        let own_seq = self.next_seq();
        let relay = Relay {
            asker: asker.node,
            asker_addr: from,
            asker_seq: seq,
            target: target.clone(),
            nack_at: Some(now + period / 5),
            ends: now + period,
        };
        self.relays.insert(own_seq, relay);
        let body = Body::Ping { seq: own_seq, to: target.clone() };
        self.transmit(now, addr, target, None, body, News::All);
    }

    /// Takes in the result of an [`Effect::StreamPing`]: who answered, if anyone did.
    pub fn handle_stream_ping(&mut self, now: Instant, id: u64, answer: Result<Sender, ()>) {
        self.notice_lateness(now);
        let Ok(by) = answer else { return };
        if let Some(seq) = self.probe.as_ref().filter(|p| p.stream == Some(id)).map(|p| p.seq) {
            let before = self.counters.probes_answered;
            self.take_answer(seq, &by);
            self.counters.probes_answered_by_stream += self.counters.probes_answered - before;
        }
    }

    /// Tells several members that this node leaves, and stops probing. Calling it again tells
    /// others.
    pub fn handle_leave(&mut self, now: Instant) {
        self.me.state = MemberState::Left;
        self.announce_leave(now);
    }

    fn announce_leave(&mut self, now: Instant) {
        self.probe = None;
        for (id, addr) in self.choose(LEAVE_FANOUT, None) {
            self.transmit(now, addr, &id, None, Body::Leave, News::All);
        }
    }

    /// Does what is due by `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.notice_lateness(now);
        self.send_nacks(now);
        self.end_suspicions(now);
        if self.period_at.is_some_and(|at| at <= now) {
            self.turn_period(now);
        } else if let Some(probe) = &mut self.probe
            && probe.indirect_at.is_some_and(|at| at <= now)
        {
            probe.indirect_at = None;
            self.probe_indirectly(now);
        }
    }

    /// When [`Detector::handle_timeout`] must be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let probe = self.probe.as_ref().and_then(|p| p.indirect_at);
        let relays = self.relays.values().map(|r| r.nack_at.unwrap_or(r.ends)).min();
        [self.period_at, probe, relays, self.suspicions.next_deadline()].into_iter().flatten().min()
    }

    /// The oldest effect not yet handed out.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// A node that was stalled has heard nobody: the probe under way proves nothing, and no
    /// suspicion may end for the time in which its refutation could not be heard, and a period more
    /// to hear what waits in the socket.
    fn notice_lateness(&mut self, now: Instant) {
        let Some(due) = self.poll_timeout() else { return };
        let lateness = now.saturating_since(due);
        if !is_late(lateness, self.config.protocol_period) {
            return;
        }
        self.health.late();
        self.counters.rounds_voided += 1;
        self.probe = None;
        self.relays.clear();
        self.suspicions.postpone(lateness + self.config.protocol_period);
        if let Some(at) = self.period_at {
            self.period_at = Some(at.max(now));
        }
    }

    fn send_nacks(&mut self, now: Instant) {
        let mut due = Vec::new();
        self.relays.retain(|_, relay| {
            if relay.nack_at.is_some_and(|at| at <= now) {
                relay.nack_at = None;
                due.push((relay.asker_addr, relay.asker.clone(), relay.asker_seq));
            }
            relay.ends > now
        });
        for (addr, asker, seq) in due {
            self.transmit(now, addr, &asker, None, Body::Nack { seq }, News::All);
        }
    }

    fn end_suspicions(&mut self, now: Instant) {
        while let Some((id, suspicion)) = self.suspicions.pop_ended(now) {
            self.effects.push_back(Effect::Verdict(Verdict {
                id,
                generation: suspicion.generation,
                incarnation: suspicion.incarnation,
                state: MemberState::Dead,
            }));
        }
    }

    fn turn_period(&mut self, now: Instant) {
        self.stranger_replies = 0;
        if let Some(probe) = self.probe.take() {
            self.counters.probes_failed += 1;
            self.health.probe_failed(probe.helpers, probe.helpers - probe.nacks);
            self.effects.push_back(Effect::Verdict(Verdict {
                id: probe.target,
                generation: probe.generation,
                incarnation: probe.incarnation,
                state: MemberState::Suspect,
            }));
        }
        let period = self.health.stretched(self.config.protocol_period);
        self.period_at = Some(now + period);
        if self.me.state == MemberState::Left {
            self.announce_leave(now);
        } else if let Some(target) = self.round.advance(&mut self.rng) {
            self.begin_probe(now, &target, period);
        }
    }

    fn begin_probe(&mut self, now: Instant, target: &NodeId, period: Duration) {
        let seq = self.next_seq();
        let member = &self.peers[target];
        let (addr, generation) = (member.gossip, member.generation);
        self.probe = Some(Probe {
            seq,
            target: target.clone(),
            generation,
            incarnation: member.incarnation,
            addr,
            indirect_at: Some(now + period / 2),
            stream: None,
            helpers: 0,
            nacks: 0,
        });
        self.counters.probes += 1;
        let body = Body::Ping { seq, to: target.clone() };
        self.transmit(now, addr, target, None, body, News::All);
    }

    fn probe_indirectly(&mut self, now: Instant) {
        let Some(probe) = &self.probe else { return };
        let (seq, target, addr) = (probe.seq, probe.target.clone(), probe.addr);
        let helpers = self.choose(self.config.indirect_ping_count, Some(&target));
        self.stream_id += 1;
        let stream = self.stream_id;
        if let Some(probe) = &mut self.probe {
            probe.helpers = helpers.len();
            probe.stream = Some(stream);
        }
        for (id, helper) in helpers {
            let body = Body::PingReq { seq, target: target.clone(), addr };
            self.transmit(now, helper, &id, None, body, News::All);
        }
        self.effects.push_back(Effect::StreamPing { id: stream, to: addr, target });
    }

    /// Up to `count` alive members at random, without `but`.
    fn choose(&mut self, count: usize, but: Option<&NodeId>) -> Vec<(NodeId, SocketAddr)> {
        let alive = self.peers.values().filter(|m| m.state == MemberState::Alive);
        let others = alive.filter(|m| Some(&m.id) != but).map(|m| (m.id.clone(), m.gossip));
        self.rng.choose_multiple(others, count)
    }

    fn next_seq(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1);
        self.seq
    }

    /// Builds and sends a datagram to `receiver`: first its own record if it should refute it, then
    /// this node's record, so that who is spoken to always knows who speaks, then news and loads.
    fn transmit(
        &mut self,
        now: Instant,
        to: SocketAddr,
        receiver: &NodeId,
        receiver_generation: Option<Generation>,
        body: Body,
        news: News,
    ) {
        let sender = Sender { node: self.me.id.clone(), generation: self.me.generation };
        let mut writer = Writer::new(sender, body);
        if let Some(record) = self.peers.get(receiver) {
            let outlived = receiver_generation.is_some_and(|g| g < record.generation);
            if record.state != MemberState::Alive || outlived {
                writer.update(record);
            }
        }
        writer.update(&self.me);
        if news == News::All {
            if let Some(load) = self.load {
                let (node, generation) = (self.me.id.clone(), self.me.generation);
                writer.load(&LoadReport { node, generation, load, age_ms: 0 });
            }
            let limit = send_limit(self.config.retransmit_multiplier, self.members());
            self.queue.fill(&mut writer, Some(receiver), limit);
            self.pass_on_loads(now, receiver, &mut writer);
        }
        self.effects.push_back(Effect::Transmit { to, message: writer.finish() });
    }

    /// Adds loads of others while there is room, going on where the last datagram stopped.
    fn pass_on_loads(&mut self, now: Instant, receiver: &NodeId, writer: &mut Writer) {
        let start = self.load_cursor.take();
        let after = start.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let upto = start.as_ref().map_or(Bound::Excluded(&self.me.id), Bound::Included);
        let (late, early) = (
            self.peers.range::<NodeId, _>((after, Bound::Unbounded)),
            self.peers.range::<NodeId, _>((Bound::Unbounded, upto)),
        );
        let early = start.is_some().then_some(early).into_iter().flatten();
        for id in late.chain(early).map(|(id, _)| id).take(LOADS_LOOKED_AT_MAX) {
            self.load_cursor = Some(id.clone());
            let report = self.loads.report_of(now, id).filter(|_| id != receiver);
            let fresh = report.filter(|r| Duration::from_millis(r.age_ms.into()) < LOAD_AGE_MAX);
            if fresh.is_some_and(|report| !writer.load(&report)) {
                return;
            }
        }
    }
}

/// How much a datagram carries beside its body and the two records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    All,
    None,
}
