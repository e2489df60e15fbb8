//! Admission: whose name is it?
//!
//! A newcomer whose name nobody present has is admitted at once, from whatever address. Otherwise
//! the address on record is asked first: whoever answers there keeps the name.

use crate::limits::{ADMISSION_WAIT, ADMISSIONS_MAX};
use crate::swim::members::{DialError, Effect, Members, Phase, Purpose, Source, Target};
use crate::swim::{Answer, Ask, Member, MemberState};
use crate::time::Instant;
use crate::wire::datagram::Sender;

impl Members {
    pub(super) fn handle_join(&mut self, now: Instant, id: u64, newcomer: Member) {
        if newcomer.id == self.me {
            // The number of a boot is unique in one store: two stores may give the same.
            let me = self.me();
            let itself = newcomer.boot() == me.boot() && newcomer.gossip == me.gossip;
            let answer = if itself {
                Answer::State { members: Vec::new(), highest: None }
            } else {
                self.counters.newcomers_refused += 1;
                Answer::Refused { holder: self.me().gossip }
            };
            self.answer(id, answer);
            return;
        }
        match self.table.get(&newcomer.id) {
            Some(holder) if holder.is_present() && holder.gossip != newcomer.gossip => {
                self.ask_holder(now, id, newcomer, holder.clone());
            }
            _ => self.admit(now, id, newcomer),
        }
    }

    /// A name that someone present has at another address: whoever answers there keeps it.
    fn ask_holder(&mut self, now: Instant, ask: u64, newcomer: Member, holder: Member) {
        let pending =
            self.dials.values().filter(|d| matches!(d.purpose, Purpose::Admission { .. })).count();
        if pending >= ADMISSIONS_MAX {
            self.effects.push_back(Effect::Decline { id: ask });
            return;
        }
        let to = Target::Addr(holder.gossip);
        let purpose = Purpose::Admission { ask, newcomer, holder };
        self.dial(now, purpose, to, Ask::Ping, ADMISSION_WAIT);
    }

    /// Admits a newcomer, from whatever address, unless the mesh knows a boot of its name that is
    /// not older: then it is told to come back above that.
    fn admit(&mut self, now: Instant, id: u64, newcomer: Member) {
        let known = self.table.get(&newcomer.id);
        let same_boot = |k: &&Member| k.boot() == newcomer.boot() && k.state != MemberState::Left;
        let highest = known.filter(|k| !same_boot(k)).map(|known| known.generation);
        if highest.is_some_and(|highest| highest >= newcomer.generation) {
            self.answer(id, Answer::State { members: Vec::new(), highest });
            return;
        }
        let name = newcomer.id.clone();
        self.merge(now, newcomer, Source::State);
        if self.table.get(&name).is_none() {
            self.effects.push_back(Effect::Decline { id });
            return;
        }
        if self.phase == (Phase::Joining { asked: None }) && self.seeds.is_empty() {
            self.phase = Phase::Member;
        }
        self.flush();
        self.answer_state(id, highest);
    }

    pub(super) fn decide_admission(
        &mut self,
        now: Instant,
        ask: u64,
        newcomer: Member,
        holder: &Member,
        answer: Result<(Sender, Answer), DialError>,
    ) {
        if self.is_over() {
            self.effects.push_back(Effect::Decline { id: ask });
            return;
        }
        let held = answer.is_ok_and(|(by, answer)| {
            // The newcomer itself may answer at its old address, as the newer boot that it is.
            let itself = by.generation == newcomer.generation && by.generation > holder.generation;
            answer == Answer::Pong
                && by.node == holder.id
                && by.generation >= holder.generation
                && !itself
        });
        if held {
            self.counters.newcomers_refused += 1;
            self.answer(ask, Answer::Refused { holder: holder.gossip });
        } else {
            self.admit(now, ask, newcomer);
        }
    }
}
