//! The member table and its rules: precedence, refutation, admission, departure, state exchange.
//!
//! Invariants: of two records of one id the one of greater [`Member::precedence`] stands; this
//! node's own record is raised only by itself; a boot that learns of a newer boot of its name does
//! nothing more; nobody who left is dialled.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use crate::id::{Generation, Incarnation, NodeId};
use crate::limits::{
    ADMISSIONS_MAX, CONNECT_TIMEOUT, MEMBERS_MAX, RESPONSE_TIMEOUT, SEEDS_MAX, SYNC_DIALS_MAX,
};
use crate::load::LoadTable;
use crate::swim::sync::{Redials, Seeds, Syncs};
use crate::swim::table::Table;
use crate::swim::{
    Answer, Ask, Changed, Heard, Member, MemberState, MembershipEvent, SwimConfig, Verdict,
};
use crate::time::Instant;
use crate::wire::datagram::Sender;
use crate::wire::stream::StreamError;

mod admission;
mod effect;
#[cfg(test)]
mod tests;

pub use effect::{Counters, DialError, Effect, Target};

/// A dial that brought no answer by then never will: connecting and answering, with room for a
/// slow caller.
const DIAL_EXPIRY: Duration = Duration::from_secs(10);

/// Most dials at one time: one a seed, one for want of seeds, those for admissions, and those of
/// state exchange.
pub const DIALS_MAX: usize = SEEDS_MAX + 1 + ADMISSIONS_MAX + SYNC_DIALS_MAX;

/// The membership of one node.
///
/// Call order: [`Members::start`] once, then any `handle_*`; after each, [`Members::poll_effect`]
/// until `None`, then [`Members::poll_timeout`].
#[derive(Debug)]
pub struct Members {
    config: SwimConfig,
    me: NodeId,
    phase: Phase,
    table: Table,
    loads: LoadTable,
    rng: fastrand::Rng,
    seeds: Seeds,
    syncs: Syncs,
    redials: Redials,
    dials: BTreeMap<u64, Dial>,
    next_dial: u64,
    changed: Changed,
    counters: Counters,
    effects: VecDeque<Effect>,
}

/// How far this node has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nobody has admitted it yet. What it hears of its own name may still be of an earlier boot.
    /// `asked` is the generation that it was told to take and has not taken.
    Joining { asked: Option<Generation> },
    /// A member among others.
    Member,
    /// It said goodbye.
    Left,
    /// It must stop.
    Stopped,
}

#[derive(Debug)]
struct Dial {
    purpose: Purpose,
    expires: Instant,
}

#[derive(Debug)]
enum Purpose {
    /// A seed, by its index; whether it was asked to admit this node.
    Seed { index: usize, join: bool },
    /// A member that was asked to admit this node, for want of a seed.
    Join,
    /// A random member.
    Sync,
    /// A dead one.
    Redial(NodeId),
    /// The holder of a newcomer's name.
    Admission { ask: u64, newcomer: Member, holder: Member },
}

/// Where a record comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The dissemination of something that just happened.
    Datagram,
    /// A full table: what it says of the dead may be an old story.
    State,
}

impl Members {
    /// The membership of `me`, which joins by `seeds` (host names or addresses, with a port). Its
    /// randomness is from `seed`. It does nothing before [`Members::start`].
    pub fn new(config: SwimConfig, me: Member, seeds: Vec<String>, seed: u64) -> Self {
        let mut members = Self {
            me: me.id.clone(),
            phase: Phase::Joining { asked: None },
            table: Table::default(),
            loads: LoadTable::default(),
            rng: fastrand::Rng::with_seed(seed),
            seeds: Seeds::new(&config),
            syncs: Syncs::new(&config),
            redials: Redials::new(&config),
            dials: BTreeMap::new(),
            next_dial: 0,
            changed: Changed::default(),
            counters: Counters::default(),
            effects: VecDeque::new(),
            config,
        };
        members.put(Instant::ZERO, me);
        members.effects.clear();
        members.counters.seeds_ignored = members.seeds.add(Instant::ZERO, seeds) as u64;
        members
    }

    /// Announces this node to the detector and dials the seeds.
    pub fn start(&mut self, now: Instant) {
        self.syncs.restart(now, &mut self.rng);
        self.flush();
        self.dial_seeds(now);
    }

    /// More seeds, dialled at once.
    pub fn add_seeds(&mut self, now: Instant, seeds: Vec<String>) {
        self.counters.seeds_ignored += self.seeds.add(now, seeds) as u64;
        self.dial_seeds(now);
    }

    /// Takes the generation that was asked for by [`Effect::GenerationTooLow`] and joins again.
    pub fn set_generation(&mut self, now: Instant, generation: Generation) {
        if self.is_over() {
            return;
        }
        let me = Member { generation, incarnation: Incarnation(0), ..self.me().clone() };
        self.phase = Phase::Joining { asked: None };
        // What is asked under the old generation proves nothing for the new one.
        self.dials.retain(|_, d| !matches!(d.purpose, Purpose::Seed { .. } | Purpose::Join));
        self.put(now, me);
        self.flush();
        self.syncs.restart(now, &mut self.rng);
        self.seeds.restart(now);
        self.dial_seeds(now);
        if self.seeds.is_empty()
            && let Some(member) = self.random_other()
        {
            let ask = Ask::Join { me: self.me().clone() };
            self.dial(now, Purpose::Join, Target::Addr(member.gossip), ask, DIAL_EXPIRY);
        }
    }

    /// Every record, tombstones included, by id.
    pub fn table(&self) -> impl Iterator<Item = &Member> {
        self.table.iter()
    }

    /// This node's own record.
    pub fn me(&self) -> &Member {
        self.table.get(&self.me).expect("the own record is put at construction and never evicted")
    }

    /// Who is present, as the first event of a subscription.
    pub fn snapshot(&self) -> MembershipEvent {
        self.table.snapshot()
    }

    /// The newest known loads of present members.
    pub fn loads(&self) -> &LoadTable {
        &self.loads
    }

    /// Dials that have brought no answer yet; at most [`DIALS_MAX`].
    pub fn open_dials(&self) -> usize {
        self.dials.len()
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Takes in what datagrams said.
    pub fn handle_heard(&mut self, now: Instant, heard: Heard) {
        if self.is_over() {
            return;
        }
        for member in heard.updates {
            self.merge(now, member, Source::Datagram);
        }
        for report in heard.loads {
            let is_present = self.table.get(&report.node).is_some_and(Member::is_present);
            if is_present && report.node != self.me && self.loads.observe(now, &report) {
                self.effects.push_back(Effect::Load(report));
            }
        }
        let alone = self.seeds.is_empty() && self.table.present().nth(1).is_some();
        if alone && self.phase == (Phase::Joining { asked: None }) {
            self.phase = Phase::Member;
        }
        self.flush();
    }

    /// Takes in what a probe or a suspicion came to. It applies only to the very record that was
    /// probed.
    pub fn handle_verdict(&mut self, now: Instant, verdict: &Verdict) {
        if self.is_over() || verdict.id == self.me {
            return;
        }
        let Some(known) = self.table.get(&verdict.id) else { return };
        if (known.generation, known.incarnation) == (verdict.generation, verdict.incarnation)
            && known.state < verdict.state
        {
            let member = Member { state: verdict.state, ..known.clone() };
            self.put(now, member);
            self.flush();
        }
    }

    /// Takes in a peer's request. It is answered by [`Effect::Answer`] or [`Effect::Decline`] of the
    /// same `id`, at once or within [`ADMISSION_WAIT`](crate::limits::ADMISSION_WAIT).
    pub fn handle_ask(&mut self, now: Instant, id: u64, from: &Sender, ask: Ask) {
        if self.is_over() {
            self.effects.push_back(Effect::Decline { id });
            return;
        }
        match ask {
            Ask::Ping => self.answer(id, Answer::Pong),
            Ask::Sync { members } => {
                for member in members {
                    self.merge(now, member, Source::State);
                }
                self.flush();
                if self.is_over() {
                    self.effects.push_back(Effect::Decline { id });
                    return;
                }
                let highest = self.table.get(&from.node).map(|known| known.generation);
                self.answer_state(id, highest);
            }
            Ask::Join { me: newcomer } => {
                if (&newcomer.id, newcomer.generation) == (&from.node, from.generation)
                    && newcomer.state == MemberState::Alive
                {
                    self.handle_join(now, id, newcomer);
                } else {
                    self.effects.push_back(Effect::Decline { id });
                }
            }
        }
    }

    fn answer_state(&mut self, id: u64, highest: Option<Generation>) {
        let members = self.table.iter().cloned().collect();
        self.answer(id, Answer::State { members, highest });
    }

    fn answer(&mut self, id: u64, answer: Answer) {
        self.effects.push_back(Effect::Answer { id, answer });
    }

    /// Takes in what an [`Effect::Dial`] brought. Ids that are not awaited are ignored.
    pub fn handle_answer(
        &mut self,
        now: Instant,
        id: u64,
        answer: Result<(Sender, Answer), DialError>,
    ) {
        let Some(dial) = self.dials.remove(&id) else { return };
        self.finish_dial(now, dial.purpose, answer);
    }

    fn finish_dial(
        &mut self,
        now: Instant,
        purpose: Purpose,
        answer: Result<(Sender, Answer), DialError>,
    ) {
        if let Purpose::Admission { ask, newcomer, holder } = purpose {
            self.decide_admission(now, ask, newcomer, &holder, answer);
            return;
        }
        if self.is_over() {
            return;
        }
        match answer {
            Ok((by, Answer::State { members, highest })) => {
                let myself = by.node == self.me && by.generation == self.me().generation;
                if !myself {
                    self.take_state(now, &purpose, members, highest);
                }
                match purpose {
                    Purpose::Seed { index, .. } => {
                        self.seeds.answered(now, &mut self.rng, index, by.node);
                    }
                    Purpose::Redial(id) => self.redials.failed(now, &mut self.rng, &id),
                    _ => {}
                }
            }
            Ok((_, Answer::Refused { holder })) => {
                self.phase = Phase::Stopped;
                self.effects.push_back(Effect::Refused { holder });
            }
            Ok((_, Answer::Pong)) => {
                let error = StreamError::Unexpected("a pong to another request");
                self.dial_failed(now, purpose, error.into());
            }
            Err(error) => self.dial_failed(now, purpose, error),
        }
    }

    fn dial_failed(&mut self, now: Instant, purpose: Purpose, error: DialError) {
        match purpose {
            Purpose::Seed { index, .. } => {
                if let Some(seed) = self.seeds.failed(now, &mut self.rng, index) {
                    self.effects.push_back(Effect::SeedUnreachable { seed, error });
                }
            }
            Purpose::Redial(id) => self.redials.failed(now, &mut self.rng, &id),
            _ => {}
        }
    }

    fn take_state(
        &mut self,
        now: Instant,
        purpose: &Purpose,
        members: Vec<Member>,
        highest: Option<Generation>,
    ) {
        self.counters.syncs += 1;
        let mine = self.me().generation;
        if matches!(purpose, Purpose::Seed { join: true, .. } | Purpose::Join) {
            if let Some(highest) = highest.filter(|highest| *highest >= mine) {
                self.outranked(highest);
            } else if self.phase == (Phase::Joining { asked: None }) {
                self.phase = Phase::Member;
                self.effects.push_back(Effect::Joined);
                self.syncs.restart(now, &mut self.rng);
            }
        } else if let Some(highest) = highest.filter(|highest| *highest > mine) {
            self.outranked(highest);
        }
        for member in members {
            self.merge(now, member, Source::State);
        }
        self.flush();
    }

    /// Says goodbye. Nothing is dialled, asked or answered afterwards.
    pub fn leave(&mut self, now: Instant) {
        if self.is_over() {
            return;
        }
        self.phase = Phase::Left;
        let me = Member { state: MemberState::Left, ..self.me().clone() };
        self.put(now, me);
        self.flush();
    }

    /// Does what is due by `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        let expired = self.dials.iter().filter(|(_, dial)| dial.expires <= now);
        let expired: Vec<u64> = expired.map(|(id, _)| *id).collect();
        for id in expired {
            self.handle_answer(now, id, Err(DialError::TimedOut));
        }
        if self.is_over() {
            return;
        }
        while let Some(id) = self.table.pop_expired(now, self.config.tombstone_retention) {
            self.forget(id);
        }
        self.dial_seeds(now);
        if self.syncs.take_due(now, &mut self.rng)
            && let Some(member) = self.random_other()
        {
            self.sync_with(now, Purpose::Sync, member.gossip);
        }
        while let Some(id) = self.redials.take_due(now) {
            match self.table.get(&id).map(|member| member.gossip) {
                Some(addr) => self.sync_with(now, Purpose::Redial(id), addr),
                None => self.redials.remove(&id),
            }
        }
        self.flush();
    }

    /// When [`Members::handle_timeout`] must be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let dials = self.dials.values().map(|dial| dial.expires).min();
        if self.is_over() {
            return dials;
        }
        let expiry = self.table.next_expiry(self.config.tombstone_retention);
        let (seeds, syncs) = (self.seeds.next_at(), self.syncs.next_at());
        [dials, expiry, seeds, syncs, self.redials.next_at()].into_iter().flatten().min()
    }

    /// The oldest effect not yet handed out.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Left | Phase::Stopped)
    }

    fn dial_seeds(&mut self, now: Instant) {
        if self.is_over() {
            return;
        }
        loop {
            let (me, table) = (&self.me, &self.table);
            let present = |id: &NodeId| id == me || table.get(id).is_some_and(Member::is_present);
            let Some((index, seed)) = self.seeds.take_due(now, present) else { return };
            let join = matches!(self.phase, Phase::Joining { .. });
            let ask = if join { Ask::Join { me: self.me().clone() } } else { self.sync_ask() };
            let purpose = Purpose::Seed { index, join };
            self.dial(now, purpose, Target::Seed(seed), ask, DIAL_EXPIRY);
        }
    }

    fn sync_with(&mut self, now: Instant, purpose: Purpose, addr: SocketAddr) {
        let is_sync = |d: &&Dial| matches!(d.purpose, Purpose::Sync | Purpose::Redial(_));
        if self.dials.values().filter(is_sync).count() >= SYNC_DIALS_MAX {
            self.dial_failed(now, purpose, DialError::TimedOut);
            return;
        }
        let ask = self.sync_ask();
        self.dial(now, purpose, Target::Addr(addr), ask, DIAL_EXPIRY);
    }

    fn sync_ask(&self) -> Ask {
        Ask::Sync { members: self.table.iter().cloned().collect() }
    }

    fn dial(&mut self, now: Instant, purpose: Purpose, to: Target, ask: Ask, within: Duration) {
        self.next_dial += 1;
        let id = self.next_dial;
        self.dials.insert(id, Dial { purpose, expires: now + within });
        self.effects.push_back(Effect::Dial { id, to, ask });
    }

    fn random_other(&mut self) -> Option<Member> {
        let me = &self.me;
        let others: Vec<&Member> = self.table.present().filter(|m| m.id != *me).collect();
        self.rng.choice(others).cloned()
    }

    /// Takes in a record by precedence.
    fn merge(&mut self, now: Instant, mut member: Member, source: Source) {
        let ip = member.gossip.ip();
        if member.gossip.port() == 0 || ip.is_unspecified() || ip.is_multicast() {
            self.counters.records_unusable += 1;
            return;
        }
        if member.id == self.me {
            self.hear_of_myself(now, &member);
            return;
        }
        match self.table.get(&member.id) {
            // Old tombstones would go round among old members for ever; a young node needs them,
            // lest it believe a straggler's record of someone long dead.
            None if !member.is_present() && source == Source::State && !self.syncs.is_young() => {
                return;
            }
            Some(known) => {
                // What another's table calls dead may have lived on here, behind a partition: it is
                // given the time of a suspicion to say so.
                if source == Source::State
                    && member.state == MemberState::Dead
                    && known.is_present()
                {
                    member.state = MemberState::Suspect;
                }
                if member.precedence() <= known.precedence() {
                    return;
                }
            }
            None => {}
        }
        self.put(now, member);
    }

    /// What others say of this node. An accusation is refuted by a higher incarnation; a newer boot
    /// is obeyed.
    fn hear_of_myself(&mut self, now: Instant, said: &Member) {
        let me = self.me();
        if said.boot() > me.boot() {
            self.outranked(said.generation);
        } else if said.boot() == me.boot() && said.precedence() > me.precedence() {
            let me = Member { incarnation: said.incarnation.next(), ..me.clone() };
            self.counters.refutations += 1;
            self.put(now, me);
        }
    }

    /// The mesh knows a boot of this name that is not older. Before anyone admitted this node it is
    /// told of, and must go above, what may be its own past; later it is someone else's present.
    fn outranked(&mut self, by: Generation) {
        match &mut self.phase {
            Phase::Joining { asked } => {
                let at_least = by.next();
                if asked.is_none_or(|asked| asked < at_least) {
                    *asked = Some(at_least);
                    self.effects.push_back(Effect::GenerationTooLow { at_least });
                }
            }
            Phase::Member => {
                self.phase = Phase::Stopped;
                self.effects.push_back(Effect::Fenced { by });
            }
            Phase::Left | Phase::Stopped => {}
        }
    }

    /// Writes a record down, tells subscribers, and keeps it for the detector.
    fn put(&mut self, now: Instant, member: Member) {
        let Ok(put) = self.table.put(now, member.clone()) else {
            self.counters.table_full += 1;
            return;
        };
        if let Some(id) = put.evicted {
            self.forget(id);
        }
        if member.id != self.me {
            if member.state == MemberState::Dead {
                let stale = put.event.is_none();
                self.redials.add(now, &mut self.rng, &member.id, stale);
            } else {
                self.redials.remove(&member.id);
            }
            if !member.is_present() {
                self.loads.remove(&member.id);
                self.seeds.gone(now, &mut self.rng, &member.id);
            }
        }
        self.effects.extend(put.event.map(Effect::Event));
        self.changed.members.push(member);
    }

    fn forget(&mut self, id: NodeId) {
        self.redials.remove(&id);
        self.loads.remove(&id);
        self.changed.members.retain(|member| member.id != id);
        self.changed.forgotten.push(id);
    }

    fn flush(&mut self) {
        let changed = std::mem::take(&mut self.changed);
        if changed != Changed::default() {
            self.effects.push_back(Effect::Changed(changed));
        }
    }
}

const _: () = assert!(
    DIAL_EXPIRY.as_millis() > 2 * (CONNECT_TIMEOUT.as_millis() + RESPONSE_TIMEOUT.as_millis()),
    "a dial is given up by who made it before it is given up here"
);
const _: () = assert!(MEMBERS_MAX > 2, "a table has room for this node and another");
