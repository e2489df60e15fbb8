//! The machines of one node, as one thing with inputs and outputs.

use std::net::SocketAddr;

use crate::id::Generation;
use crate::load::LoadReport;
use crate::swim::members::{DialError, Target};
use crate::swim::node::{Effect, Mail, Node};
use crate::swim::{Answer, Ask, MembershipEvent};
use crate::time::Instant;
use crate::wire::datagram::{Datagram, Sender};

/// All machines of one node.
#[derive(Debug)]
pub struct Machines {
    /// Its membership.
    pub swim: Node,
}

/// What comes to a node.
#[derive(Clone, Debug)]
pub enum Input {
    /// It is started.
    Start,
    /// A timer is due.
    Timeout,
    /// A datagram arrived.
    Datagram(SocketAddr, Datagram),
    /// A message from one of its machines to another.
    Mail(Mail),
    /// A peer's request by stream.
    Ask(u64, Sender, Ask),
    /// What its own request by stream brought.
    Answer(Waiter, Result<(Sender, Answer), DialError>),
    /// The store allocated it a generation.
    Registered(Generation),
    /// It is to leave.
    Leave,
}

/// Which machine awaits an answer, and under which number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiter {
    /// The detector's stream ping.
    Detector(u64),
    /// The members' dial.
    Members(u64),
}

/// What a node asks of its surroundings.
#[derive(Clone, Debug)]
pub enum Output {
    /// Send a datagram's message.
    Datagram(SocketAddr, Vec<u8>),
    /// Deliver a message to another of its machines.
    Mail(Mail),
    /// Ask by stream.
    Ask(Waiter, Target, Ask),
    /// Answer a peer's request, or close it.
    Answer(u64, Option<Answer>),
    /// Tell subscribers.
    Event(MembershipEvent),
    /// Someone's load is news.
    Load(LoadReport),
    /// Register this generation at least.
    Register(Generation),
    /// A member has admitted this boot.
    Joined,
    /// Stop: a newer boot lives.
    Fenced(Generation),
    /// Stop: the name is taken.
    Refused(SocketAddr),
    /// A seed does not answer.
    SeedUnreachable(String),
}

impl Machines {
    /// Gives the machines one input.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Start => self.swim.start(now),
            Input::Timeout => self.swim.handle_timeout(now),
            Input::Datagram(from, datagram) => self.swim.handle_datagram(now, from, datagram),
            Input::Mail(mail) => self.swim.handle_mail(now, mail),
            Input::Ask(id, from, ask) => self.swim.handle_ask(now, id, &from, ask),
            Input::Answer(Waiter::Members(id), answer) => {
                self.swim.handle_answer(now, id, answer);
            }
            Input::Answer(Waiter::Detector(id), answer) => {
                let by = answer.ok().filter(|(_, answer)| *answer == Answer::Pong);
                self.swim.handle_stream_ping(now, id, by.map(|(by, _)| by).ok_or(()));
            }
            Input::Registered(generation) => self.swim.set_generation(now, generation),
            Input::Leave => self.swim.leave(now),
        }
    }

    /// Takes the next output.
    pub fn poll_output(&mut self) -> Option<Output> {
        Some(match self.swim.poll_effect()? {
            Effect::Transmit { to, message } => Output::Datagram(to, message),
            Effect::StreamPing { id, to, .. } => {
                Output::Ask(Waiter::Detector(id), Target::Addr(to), Ask::Ping)
            }
            Effect::Mail(mail) => Output::Mail(mail),
            Effect::Event(event) => Output::Event(event),
            Effect::Load(report) => Output::Load(report),
            Effect::Dial { id, to, ask } => Output::Ask(Waiter::Members(id), to, ask),
            Effect::Answer { id, answer } => Output::Answer(id, answer),
            Effect::GenerationTooLow { at_least } => Output::Register(at_least),
            Effect::Joined => Output::Joined,
            Effect::Fenced { by } => Output::Fenced(by),
            Effect::Refused { holder } => Output::Refused(holder),
            Effect::SeedUnreachable { seed, .. } => Output::SeedUnreachable(seed),
        })
    }

    /// When the machines want [`Input::Timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.swim.poll_timeout()
    }

    /// Who they are, as a greeting says it.
    pub fn sender(&self) -> Sender {
        let me = self.swim.members().me();
        Sender { node: me.id.clone(), generation: me.generation }
    }
}
