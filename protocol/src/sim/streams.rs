//! Streams between hosts: a request, carried as its frames, and one answer or a failure.

use std::time::Duration;

use crate::limits::{CONNECT_TIMEOUT, RESPONSE_TIMEOUT};
use crate::sim::machines::{Input, Machines, Waiter};
use crate::sim::world::{Event, HostIx, World};
use crate::swim::members::{DialError, Target};
use crate::swim::{Answer, Ask};
use crate::wire::stream::{
    AnswerReader, AskReader, FRAME_HEADER_BYTES, GossipFrame, answer_frames, ask_frames,
    decode_frame, encode_frame,
};

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) from: HostIx,
    pub(super) from_boot: u64,
    pub(super) waiter: Waiter,
    pub(super) to: HostIx,
    /// The boot that took the request.
    pub(super) to_boot: Option<u64>,
    pub(super) ask: Ask,
}

impl World {
    pub(super) fn dial(&mut self, host: HostIx, waiter: Waiter, to: &Target, ask: &Ask) {
        self.next_stream += 1;
        let id = self.next_stream;
        let addr = match to {
            Target::Addr(addr) => Some(*addr),
            Target::Seed(name) => name.parse().ok().or_else(|| self.names.get(name).copied()),
        };
        let receiver = addr.and_then(|addr| self.host_at(addr));
        let stream = Stream {
            from: host,
            from_boot: self.hosts[host].boot,
            waiter,
            to: receiver.unwrap_or(host),
            to_boot: None,
            ask: carry_ask(ask),
        };
        self.streams.insert(id, stream);
        let refused = |text: &str| DialError::Unreachable(text.to_string());
        let (after, event) = match (addr, receiver) {
            (None, _) => {
                let error = DialError::Unresolved("no such name".to_string());
                (Duration::ZERO, Event::Answered { stream: id, answer: Err(error) })
            }
            (_, Some(to)) if self.network.is_open(host, to) && self.network.is_open(to, host) => {
                if self.hosts[to].machines.is_some() {
                    let three_ways =
                        (0..3).map(|_| self.network.stream(&mut self.rng)).sum::<Duration>();
                    (three_ways, Event::Connect { stream: id })
                } else if self.rng.bool() {
                    let error = refused("connection refused");
                    let takes = 2 * self.network.stream(&mut self.rng);
                    (takes, Event::Answered { stream: id, answer: Err(error) })
                } else {
                    let error = DialError::TimedOut;
                    (CONNECT_TIMEOUT, Event::Answered { stream: id, answer: Err(error) })
                }
            }
            _ => {
                let error = DialError::TimedOut;
                (CONNECT_TIMEOUT, Event::Answered { stream: id, answer: Err(error) })
            }
        };
        self.schedule(after, event);
    }

    pub(super) fn connect(&mut self, id: u64) {
        let error = Err(DialError::TimedOut);
        self.schedule(RESPONSE_TIMEOUT, Event::Answered { stream: id, answer: error });
        let Some(stream) = self.streams.get(&id) else { return };
        let (from, to, ask) = (stream.from, stream.to, stream.ask.clone());
        let Some(asker) = &self.hosts[from].machines else { return };
        if self.hosts[to].machines.is_none() || !self.network.is_open(from, to) {
            return;
        }
        let input = Input::Ask(id, asker.sender(), ask);
        let boot = self.hosts[to].boot;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.to_boot = Some(boot);
        }
        self.deliver(to, input);
    }

    pub(super) fn answer(&mut self, host: HostIx, id: u64, answer: Option<Answer>) {
        let boot = self.hosts[host].boot;
        let Some(by) = self.hosts[host].machines.as_ref().map(Machines::sender) else { return };
        let Some(stream) = self.streams.get(&id) else { return };
        if stream.to_boot != Some(boot) || !self.network.is_open(host, stream.from) {
            return;
        }
        let answer = match answer {
            Some(answer) => Ok((by, carry_answer(&answer))),
            None => Err(DialError::Closed),
        };
        let takes = self.network.stream(&mut self.rng);
        self.schedule(takes, Event::Answered { stream: id, answer });
    }
}

/// The request as its frames carry it.
fn carry_ask(ask: &Ask) -> Ask {
    let mut reader = AskReader::default();
    let mut read = None;
    for frame in ask_frames(ask) {
        read = reader.frame(carry_frame(&frame)).expect("its own frames are in order");
    }
    read.expect("the frames of a request make a request")
}

/// The answer as its frames carry it.
fn carry_answer(answer: &Answer) -> Answer {
    let mut reader = AnswerReader::default();
    let mut read = None;
    for frame in answer_frames(answer) {
        read = reader.frame(carry_frame(&frame)).expect("its own frames are in order");
    }
    read.expect("the frames of an answer make an answer")
}

fn carry_frame(frame: &GossipFrame) -> GossipFrame {
    let bytes = encode_frame(frame).expect("a frame within its bound");
    decode_frame(&bytes[FRAME_HEADER_BYTES..]).expect("what was encoded decodes")
}
