//! The virtual network: what becomes of a datagram or a stream between two hosts.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::time::micros;

/// How long TCP waits before it sends a lost segment again.
const RETRANSMIT: Duration = Duration::from_millis(200);

/// What the network does to everything that crosses it.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The share of datagrams that are lost. Streams are delayed by it instead.
    pub loss: f64,
    /// The share of datagrams that arrive twice.
    pub duplication: f64,
    /// How long one way takes. Datagrams overtake each other within it.
    pub delay: RangeInclusive<Duration>,
    /// How long a message between two machines of one node waits in a mailbox. Order is kept.
    pub mailbox: RangeInclusive<Duration>,
    /// How late a timer fires.
    pub timer: RangeInclusive<Duration>,
}

impl Faults {
    /// A local network at its best.
    pub fn none() -> Self {
        let us = Duration::from_micros;
        Self {
            loss: 0.0,
            duplication: 0.0,
            delay: us(50)..=us(500),
            mailbox: us(1)..=us(200),
            timer: us(0)..=us(1_000),
        }
    }

    /// A network that loses this share of datagrams, repeats some, and reorders many.
    pub fn lossy(loss: f64) -> Self {
        let ms = Duration::from_millis;
        Self {
            loss,
            duplication: 0.02,
            delay: ms(1)..=ms(20),
            mailbox: ms(0)..=ms(5),
            ..Self::none()
        }
    }
}

/// Links between hosts, by their index.
#[derive(Debug)]
pub struct Network {
    /// Faults of every link.
    pub faults: Faults,
    blocked: BTreeSet<(usize, usize)>,
}

impl Network {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults, blocked: BTreeSet::new() }
    }

    /// Lets nothing pass from one host to another; the way back is another link.
    pub fn block(&mut self, from: usize, to: usize) {
        self.blocked.insert((from, to));
    }

    /// Lets everything pass again.
    pub fn unblock_all(&mut self) {
        self.blocked.clear();
    }

    pub(super) fn is_open(&self, from: usize, to: usize) -> bool {
        !self.blocked.contains(&(from, to))
    }

    /// After how long each copy of a datagram arrives.
    pub(super) fn datagram(
        &self,
        rng: &mut fastrand::Rng,
        from: usize,
        to: usize,
    ) -> Vec<Duration> {
        if !self.is_open(from, to) || rng.f64() < self.faults.loss {
            return Vec::new();
        }
        let copies = if rng.f64() < self.faults.duplication { 2 } else { 1 };
        (0..copies).map(|_| within(rng, &self.faults.delay)).collect()
    }

    /// How long one message of a stream takes one way.
    pub(super) fn stream(&self, rng: &mut fastrand::Rng) -> Duration {
        let mut takes = within(rng, &self.faults.delay);
        for _ in 0..5 {
            if rng.f64() >= self.faults.loss {
                break;
            }
            takes += RETRANSMIT;
        }
        takes
    }
}

/// A random duration of `range`.
pub(super) fn within(rng: &mut fastrand::Rng, range: &RangeInclusive<Duration>) -> Duration {
    Duration::from_micros(rng.u64(micros(*range.start())..=micros(*range.end())))
}
