//! The probe cycle: whom to ping, what an answer or its absence means, what to tell along the way.
//!
//! Invariants: a verdict is given only on a round in which this node's own timers were on time; an
//! answer counts only if the probed boot gave it; every datagram is filled by measure and never
//! above its budget; a datagram to a member that is thought to be anything but alive carries that
//! record first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use crate::id::{Generation, Incarnation, NodeId};
use crate::limits::STRANGER_REPLIES_MAX;
use crate::load::{Load, LoadReport};
use crate::swim::dissemination::send_limit;
use crate::swim::health::{Health, is_late};
use crate::swim::suspicion::{self, Suspicions};
use crate::swim::{Boot, Changed, Heard, Member, MemberState, SwimConfig, Verdict};
use crate::time::Instant;
use crate::wire::datagram::{Body, Datagram, Sender};

mod composer;
mod effect;
mod relay;
mod round;

#[cfg(test)]
mod tests;

pub use effect::{Counters, Effect};

use composer::{Composer, Letter, News};
use relay::{Asker, Relays};
use round::Round;

/// Members that are told of a departure at once, and again each period while the node still runs.
const LEAVE_FANOUT: usize = 8;

/// Suspects that this node's own probes accused and that it goes on pinging, once a period each: a
/// suspicion must not stand because one datagram was lost.
const ACCUSED_MAX: usize = 8;

/// Accusers of this node that are told of its refutation, beside others at random.
const ACCUSERS_MAX: usize = 8;

/// The failure detector of one node.
///
/// Call order: [`Detector::start`] once, then any `handle_*`; after each, [`Detector::poll_effect`]
/// until `None`, then [`Detector::poll_timeout`]. [`Detector::set_load`] may come before any of them.
#[derive(Debug)]
pub struct Detector {
    config: SwimConfig,
    composer: Composer,
    rng: fastrand::Rng,
    /// Everybody else, as members last said.
    peers: BTreeMap<NodeId, Member>,
    present: usize,
    round: Round,
    probe: Option<Probe>,
    relays: Relays,
    suspicions: Suspicions,
    /// Those that this node's own probes found silent, while the suspicion stands.
    accused: BTreeSet<NodeId>,
    /// Who passed on an accusation of this node that it has not refuted yet.
    accusers: BTreeMap<NodeId, SocketAddr>,
    health: Health,
    period_at: Option<Instant>,
    stranger_replies: u32,
    seq: u32,
    stream_id: u64,
    counters: Counters,
    effects: VecDeque<Effect>,
}

#[derive(Debug)]
struct Probe {
    seq: u32,
    target: NodeId,
    boot: Boot,
    incarnation: Incarnation,
    /// When others are asked; `None` once they were.
    indirect_at: Option<Instant>,
    stream: Option<u64>,
    helpers: usize,
    nacks: usize,
}

impl Detector {
    /// A detector for `me`, with its randomness from `seed`. It does nothing before
    /// [`Detector::start`].
    pub fn new(config: SwimConfig, me: Member, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let seq = rng.u32(..);
        Self {
            config,
            composer: Composer::new(me),
            rng,
            peers: BTreeMap::new(),
            present: 0,
            round: Round::default(),
            probe: None,
            relays: Relays::default(),
            suspicions: Suspicions::default(),
            accused: BTreeSet::new(),
            accusers: BTreeMap::new(),
            health: Health::default(),
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
        self.composer.load = Some(load);
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
        self.composer.queue.len()
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
            if member.id == self.me().id {
                self.adopt_own(now, member);
            } else {
                self.adopt(now, member);
            }
        }
    }

    fn adopt_own(&mut self, now: Instant, member: Member) {
        let refutes =
            member.boot() == self.me().boot() && member.incarnation > self.me().incarnation;
        let leaves = member.state == MemberState::Left && self.me().state != MemberState::Left;
        self.composer.me = member;
        if refutes {
            self.health.accused();
            self.announce_refutation(now);
        }
        if leaves {
            self.announce_leave(now);
        }
    }

    /// Tells those who passed the accusation on, and some others, without waiting for a ping: a
    /// suspicion runs.
    fn announce_refutation(&mut self, now: Instant) {
        let mut told = std::mem::take(&mut self.accusers);
        for (id, addr) in self.choose(self.config.indirect_ping_count, None) {
            told.entry(id).or_insert(addr);
        }
        for (id, addr) in told {
            let seq = self.next_seq();
            let body = Body::Ping { seq, to: id.clone() };
            self.transmit(now, addr, &id, None, body, News::All);
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
                self.composer.loads.remove(&id);
            }
            _ => {}
        }
        if let Some(probe) = self.probe.as_ref().filter(|p| p.target == id)
            && (!member.is_present()
                || (member.boot(), member.incarnation) != (probe.boot, probe.incarnation))
        {
            self.probe = None;
        }
        self.peers.insert(id.clone(), member.clone());
        if member.state == MemberState::Suspect {
            let period = self.config.protocol_period;
            let min = suspicion::timeout(self.config.suspicion_multiplier, self.members(), period);
            let max = min * suspicion::MAX_FACTOR;
            let lasts = suspicion::shrunk(min, max, 0, suspicion::CONFIRMATIONS);
            self.suspicions.start(&member, now + lasts);
        } else {
            self.suspicions.stop(&id);
            self.accused.remove(&id);
        }
        self.composer.queue.push(member);
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
        self.accused.remove(id);
        self.composer.queue.forget(id);
        self.composer.loads.remove(id);
    }

    fn me(&self) -> &Member {
        &self.composer.me
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
        if sender.node == self.me().id && sender.generation == self.me().generation {
            self.counters.echoes += 1;
            return;
        }
        self.note_accuser(&sender, from, &updates);
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

    fn note_accuser(&mut self, sender: &Sender, from: SocketAddr, updates: &[Member]) {
        let accuses = |update: &Member| {
            update.boot() == self.me().boot() && update.precedence() > self.me().precedence()
        };
        if updates.iter().any(|update| update.id == self.me().id && accuses(update))
            && self.accusers.len() < ACCUSERS_MAX
        {
            self.accusers.insert(sender.node.clone(), from);
        }
    }

    /// Passes on to members what they do not know yet.
    fn hear(&mut self, now: Instant, mut updates: Vec<Member>, mut loads: Vec<LoadReport>) {
        updates.retain(|update| {
            let known = if update.id == self.me().id {
                Some(self.me())
            } else {
                self.peers.get(&update.id)
            };
            known.is_none_or(|known| known.precedence() < update.precedence())
        });
        loads.retain(|report| {
            self.peers.get(&report.node).is_some_and(Member::is_present)
                && self.composer.loads.observe(now, report)
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
        if *to != self.me().id {
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
        if let Some(asker) = self.relays.answered(seq, &sender.node) {
            let body = Body::AckRelay { seq: asker.seq, target: sender.clone() };
            self.transmit(now, asker.addr, &asker.id, None, body, News::All);
        } else {
            self.take_answer(seq, sender);
        }
    }

    /// An answer ends the probe if it comes from the probed id. An older boot than the probed one
    /// proves nothing; a newer one means that the probed boot is over, which its own record tells.
    fn take_answer(&mut self, seq: u32, by: &Sender) {
        match &self.probe {
            Some(probe)
                if probe.seq == seq
                    && probe.target == by.node
                    && probe.boot.generation <= by.generation =>
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
        let own_seq = self.next_seq();
        let asker = Asker { id: asker.node, addr: from, seq };
        let period = self.config.protocol_period;
        if !is_member
            || *target == self.me().id
            || !self.relays.begin(now, period, own_seq, target.clone(), asker)
        {
            self.counters.relays_refused += 1;
            return;
        }
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
        self.composer.me.state = MemberState::Left;
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
        let (relays, suspicions) = (self.relays.next_at(), self.suspicions.next_deadline());
        [self.period_at, probe, relays, suspicions].into_iter().flatten().min()
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
        for asker in self.relays.silent(now) {
            let body = Body::Nack { seq: asker.seq };
            self.transmit(now, asker.addr, &asker.id, None, body, News::All);
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
            if self.accused.len() < ACCUSED_MAX {
                self.accused.insert(probe.target.clone());
            }
            self.effects.push_back(Effect::Verdict(Verdict {
                id: probe.target,
                generation: probe.boot.generation,
                incarnation: probe.incarnation,
                state: MemberState::Suspect,
            }));
        }
        let period = self.health.stretched(self.config.protocol_period);
        self.period_at = Some(now + period);
        if self.me().state == MemberState::Left {
            self.announce_leave(now);
            return;
        }
        if let Some(target) = self.round.advance(&mut self.rng) {
            self.begin_probe(now, &target, period);
        }
        for id in self.accused.clone() {
            let seq = self.next_seq();
            let addr = self.peers[&id].gossip;
            self.transmit(now, addr, &id, None, Body::Ping { seq, to: id.clone() }, News::All);
        }
    }

    fn begin_probe(&mut self, now: Instant, target: &NodeId, period: Duration) {
        let seq = self.next_seq();
        let member = &self.peers[target];
        let boot = member.boot();
        self.probe = Some(Probe {
            seq,
            target: target.clone(),
            boot,
            incarnation: member.incarnation,
            indirect_at: Some(now + period / 2),
            stream: None,
            helpers: 0,
            nacks: 0,
        });
        self.counters.probes += 1;
        let body = Body::Ping { seq, to: target.clone() };
        self.transmit(now, boot.gossip, target, None, body, News::All);
    }

    fn probe_indirectly(&mut self, now: Instant) {
        let Some(probe) = &self.probe else { return };
        let (seq, target, addr) = (probe.seq, probe.target.clone(), probe.boot.gossip);
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

    fn transmit(
        &mut self,
        now: Instant,
        to: SocketAddr,
        receiver: &NodeId,
        receiver_generation: Option<Generation>,
        body: Body,
        news: News,
    ) {
        let letter = Letter { receiver, receiver_generation, body, news };
        let limit = send_limit(self.config.retransmit_multiplier, self.members());
        let message = self.composer.compose(now, letter, limit, &self.peers);
        self.effects.push_back(Effect::Transmit { to, message });
    }
}
