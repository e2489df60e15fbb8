//! A whole membership: detector and members, joined by their messages.

use std::net::SocketAddr;

use crate::id::{Generation, NodeId};
use crate::load::{Load, LoadReport};
use crate::swim::members::{DialError, Target};
use crate::swim::{
    Answer, Ask, Changed, Detector, Heard, Member, Members, MembershipEvent, SwimConfig, Verdict,
    detector, members,
};
use crate::time::Instant;
use crate::wire::datagram::{Datagram, Sender};

/// Detector and members of one node. What one tells the other comes out as [`Effect::Mail`], and is
/// brought back with [`Node::handle_mail`] when the caller's mailbox delivers it.
#[derive(Debug)]
pub struct Node {
    detector: Detector,
    members: Members,
}

/// A message between the two machines of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mail {
    /// Detector to members.
    Heard(Heard),
    /// Detector to members.
    Verdict(Verdict),
    /// Members to detector.
    Changed(Changed),
}

/// What a node asks of its surroundings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// As [`detector::Effect::Transmit`].
    Transmit {
        /// Where to.
        to: SocketAddr,
        /// The message, without the clear header.
        message: Vec<u8>,
    },
    /// As [`detector::Effect::StreamPing`].
    StreamPing {
        /// Names the request in the answer.
        id: u64,
        /// Where to.
        to: SocketAddr,
        /// Who should answer.
        target: NodeId,
    },
    /// A message to the other machine.
    Mail(Mail),
    /// As [`members::Effect::Event`].
    Event(MembershipEvent),
    /// As [`members::Effect::Load`].
    Load(LoadReport),
    /// As [`members::Effect::Dial`].
    Dial {
        /// Names the request in the answer.
        id: u64,
        /// Whom.
        to: Target,
        /// What.
        ask: Ask,
    },
    /// As [`members::Effect::Answer`]; `None` for [`members::Effect::Decline`].
    Answer {
        /// Which request.
        id: u64,
        /// The answer.
        answer: Option<Answer>,
    },
    /// As [`members::Effect::GenerationTooLow`].
    GenerationTooLow {
        /// The lowest that will do.
        at_least: Generation,
    },
    /// See [`members::Effect::Joined`].
    Joined,
    /// As [`members::Effect::Fenced`].
    Fenced {
        /// The newer boot.
        by: Generation,
    },
    /// As [`members::Effect::Refused`].
    Refused {
        /// Where it answered.
        holder: SocketAddr,
    },
    /// As [`members::Effect::SeedUnreachable`].
    SeedUnreachable {
        /// As the operator wrote it.
        seed: String,
        /// Why.
        error: DialError,
    },
}

impl Node {
    /// A node that joins by `seeds`, with the randomness of both machines from `seed`.
    pub fn new(config: SwimConfig, me: Member, seeds: Vec<String>, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        Self {
            detector: Detector::new(config.clone(), me.clone(), rng.u64(..)),
            members: Members::new(config, me, seeds, rng.u64(..)),
        }
    }

    /// Starts both machines.
    pub fn start(&mut self, now: Instant) {
        self.detector.start(now);
        self.members.start(now);
    }

    /// The detector.
    pub fn detector(&self) -> &Detector {
        &self.detector
    }

    /// The members.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// As [`Detector::set_load`].
    pub fn set_load(&mut self, load: Load) {
        self.detector.set_load(load);
    }

    /// Delivers a message between the machines.
    pub fn handle_mail(&mut self, now: Instant, mail: Mail) {
        match mail {
            Mail::Heard(heard) => self.members.handle_heard(now, heard),
            Mail::Verdict(verdict) => self.members.handle_verdict(now, &verdict),
            Mail::Changed(changed) => self.detector.handle_changed(now, changed),
        }
    }

    /// As [`Detector::handle_datagram`].
    pub fn handle_datagram(&mut self, now: Instant, from: SocketAddr, datagram: Datagram) {
        self.detector.handle_datagram(now, from, datagram);
    }

    /// As [`Detector::handle_stream_ping`].
    pub fn handle_stream_ping(&mut self, now: Instant, id: u64, answer: Result<Sender, ()>) {
        self.detector.handle_stream_ping(now, id, answer);
    }

    /// As [`Members::handle_ask`].
    pub fn handle_ask(&mut self, now: Instant, id: u64, from: &Sender, ask: Ask) {
        self.members.handle_ask(now, id, from, ask);
    }

    /// As [`Members::handle_answer`].
    pub fn handle_answer(
        &mut self,
        now: Instant,
        id: u64,
        answer: Result<(Sender, Answer), DialError>,
    ) {
        self.members.handle_answer(now, id, answer);
    }

    /// As [`Members::set_generation`].
    pub fn set_generation(&mut self, now: Instant, generation: Generation) {
        self.members.set_generation(now, generation);
    }

    /// As [`Members::leave`].
    pub fn leave(&mut self, now: Instant) {
        self.members.leave(now);
    }

    /// Does what is due in either machine.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.detector.poll_timeout().is_some_and(|at| at <= now) {
            self.detector.handle_timeout(now);
        }
        if self.members.poll_timeout().is_some_and(|at| at <= now) {
            self.members.handle_timeout(now);
        }
    }

    /// When [`Node::handle_timeout`] must be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        [self.detector.poll_timeout(), self.members.poll_timeout()].into_iter().flatten().min()
    }

    /// The oldest effect of the detector not yet handed out, else that of members.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        if let Some(effect) = self.detector.poll_effect() {
            return Some(match effect {
                detector::Effect::Transmit { to, message } => Effect::Transmit { to, message },
                detector::Effect::StreamPing { id, to, target } => {
                    Effect::StreamPing { id, to, target }
                }
                detector::Effect::Heard(heard) => Effect::Mail(Mail::Heard(heard)),
                detector::Effect::Verdict(verdict) => Effect::Mail(Mail::Verdict(verdict)),
            });
        }
        Some(match self.members.poll_effect()? {
            members::Effect::Changed(changed) => Effect::Mail(Mail::Changed(changed)),
            members::Effect::Event(event) => Effect::Event(event),
            members::Effect::Load(report) => Effect::Load(report),
            members::Effect::Dial { id, to, ask } => Effect::Dial { id, to, ask },
            members::Effect::Answer { id, answer } => Effect::Answer { id, answer: Some(answer) },
            members::Effect::Decline { id } => Effect::Answer { id, answer: None },
            members::Effect::GenerationTooLow { at_least } => Effect::GenerationTooLow { at_least },
            members::Effect::Fenced { by } => Effect::Fenced { by },
            members::Effect::Joined => Effect::Joined,
            members::Effect::Refused { holder } => Effect::Refused { holder },
            members::Effect::SeedUnreachable { seed, error } => {
                Effect::SeedUnreachable { seed, error }
            }
        })
    }
}
