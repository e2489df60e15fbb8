//! Prefetch: when to claim jobs from the store, and how many.
//!
//! [`Prefetcher`] works with room that the deque lends it. Invariant: it holds room only while a
//! claim is under way, and every place lent leaves exactly once, as a claimed job or in
//! [`Effect::Rest`]. So room never waits here while a peer could fill it.
//!
//! It moves on three occasions:
//!
//! - The deque runs low and lends room ([`Prefetcher::handle_idle`]). It claims at once, and again
//!   while claims come back full, unless it knows that the store is empty. What the store does not
//!   fill goes on to the thief.
//! - A nudge: the store has jobs again. It asks the deque for room ([`Effect::WantRoom`]).
//! - The poll time, for when a nudge was lost. It asks for room, too, but only while the deque wants
//!   work.
//!
//! No wake-up is lost, because a wish never depends on the room of the moment. That the store may
//! have jobs is remembered here until a claim has come back short, and a nudge that arrives while a
//! claim is under way outlives that claim. That the deque wants work is remembered there: when it
//! answers [`Effect::WantRoom`] with none, it promises to lend as soon as it runs low, and that room
//! is claimed for at once.

use std::collections::VecDeque;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use crate::id::NodeId;
use crate::limits::{CLAIM_BACKOFF, CLAIM_BACKOFF_MAX};
use crate::time::Instant;

/// How many jobs one claim asks for: a quarter of the deque, shared with the other nodes.
/// `max(1, capacity / 4 / (peers + 1))`.
pub const fn adaptive_prefetch_size(capacity: usize, peers: usize) -> usize {
    let size = capacity / 4 / peers.saturating_add(1);
    if size == 0 { 1 } else { size }
}

/// A node's own part of its poll interval, so that nodes that went idle together do not poll
/// together: `xxh3_64(id) % (period / 2)`, in whole milliseconds.
pub fn poll_jitter(id: &NodeId, period: Duration) -> Duration {
    let half_ms = u64::try_from(period.as_millis() / 2).unwrap_or(u64::MAX);
    let jitter_ms = xxh3_64(id.as_str().as_bytes()).checked_rem(half_ms);
    Duration::from_millis(jitter_ms.unwrap_or(0))
}

/// What a prefetcher may be told to do otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// Capacity of the deque, in jobs.
    pub capacity: usize,
    /// Time from a claim that found the store empty to the next look, before jitter. Shorter finds
    /// jobs sooner whose nudge was lost; each look is a query.
    pub poll_interval: Duration,
    /// The protocol period, of which up to half is added as jitter.
    pub protocol_period: Duration,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self {
            capacity: 64,
            poll_interval: Duration::from_secs(1),
            protocol_period: Duration::from_millis(500),
        }
    }
}

/// The store did not answer a claim, or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimFailed;

/// What a prefetcher is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// Claim due jobs, give those that come to the deque, and answer with
    /// [`Prefetcher::handle_claimed`] in any case.
    Claim {
        /// At most so many.
        max: usize,
    },
    /// Ask the deque for room. Answer with [`Prefetcher::handle_idle`], with a room of 0 if there is
    /// none.
    WantRoom,
    /// The store had nothing to fill this room with: it is the thief's now.
    Rest {
        /// Jobs that may arrive.
        room: usize,
    },
    /// A claim came back short: nothing that is due waits in the store. When the next job becomes due
    /// is worth a question, to be answered with [`Prefetcher::handle_next_due`].
    Drained,
}

/// Decides when to claim.
///
/// After each input: [`Prefetcher::poll_effect`] until `None`, then [`Prefetcher::poll_timeout`] says
/// when to call [`Prefetcher::handle_timeout`].
#[derive(Debug)]
pub struct Prefetcher {
    capacity: usize,
    /// The poll interval with this node's jitter.
    interval: Duration,
    peers: usize,
    /// Room in hand; 0 unless a claim is under way.
    room: usize,
    /// What the claim under way asked for.
    asked: Option<usize>,
    /// A nudge came while that claim was under way, so its answer may be older than the nudge.
    nudged: bool,
    /// The deque wanted work when it was last heard of.
    hungry: bool,
    /// Until then the store is known to have nothing.
    empty_until: Instant,
    /// Until then no claim is sent, because some failed.
    blocked_until: Instant,
    /// Until then a request for room may still be answered.
    asking_until: Instant,
    failures: u32,
    effects: VecDeque<Effect>,
}

impl Prefetcher {
    /// A prefetcher on the node `id`, alone until it hears of peers.
    pub fn new(id: &NodeId, config: PrefetchConfig) -> Self {
        Self {
            capacity: config.capacity,
            interval: config.poll_interval.saturating_add(poll_jitter(id, config.protocol_period)),
            peers: 0,
            room: 0,
            asked: None,
            nudged: false,
            hungry: false,
            empty_until: Instant::ZERO,
            blocked_until: Instant::ZERO,
            asking_until: Instant::ZERO,
            failures: 0,
            effects: VecDeque::new(),
        }
    }

    /// The deque wants work, and lends `room` beyond what it lent before. Or, with a `room` of 0, in
    /// answer to [`Effect::WantRoom`], it does not want any.
    pub fn handle_idle(&mut self, now: Instant, room: usize) {
        self.asking_until = Instant::ZERO;
        if room == 0 {
            self.hungry = false;
            return;
        }
        self.room += room;
        self.advance(now);
    }

    /// The store has jobs for this node.
    pub fn handle_nudge(&mut self, now: Instant) {
        self.empty_until = Instant::ZERO;
        if self.asked.is_some() {
            self.nudged = true;
            return;
        }
        self.hungry = true;
        self.handle_timeout(now);
    }

    /// How many other nodes there are.
    pub fn handle_peers(&mut self, peers: usize) {
        self.peers = peers;
    }

    /// The answer to [`Effect::Claim`]: how many jobs came. Without a claim under way it is ignored.
    pub fn handle_claimed(&mut self, now: Instant, answer: Result<usize, ClaimFailed>) {
        let Some(asked) = self.asked.take() else { return };
        match answer {
            Ok(got) => {
                self.failures = 0;
                self.room -= got.min(asked);
                if got < asked && !self.nudged {
                    self.empty_until = now + self.interval;
                    self.effects.push_back(Effect::Drained);
                }
            }
            Err(ClaimFailed) => {
                let doublings = self.failures.min(16);
                let pause = CLAIM_BACKOFF.saturating_mul(1 << doublings).min(CLAIM_BACKOFF_MAX);
                self.failures += 1;
                self.blocked_until = now + pause;
            }
        }
        self.advance(now);
    }

    /// The next job that is not due yet will be in `after`; none if there is no such job.
    pub fn handle_next_due(&mut self, now: Instant, after: Option<Duration>) {
        if let Some(after) = after {
            self.empty_until = self.empty_until.min(now + after);
        }
    }

    /// When [`Prefetcher::handle_timeout`] is due at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let waits = self.hungry && self.asked.is_none();
        waits.then(|| self.empty_until.max(self.blocked_until).max(self.asking_until))
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_some_and(|due| now >= due) {
            // Should the answer get lost, the deque is asked again.
            self.asking_until = now + self.interval;
            self.effects.push_back(Effect::WantRoom);
        }
    }

    /// The next thing to do, oldest first.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Spends the room in hand: on a claim if that may bring something, else it is the thief's.
    fn advance(&mut self, now: Instant) {
        if self.asked.is_some() {
            return;
        }
        if self.room == 0 {
            // All of it was filled. The deque lends again when it runs low.
            self.hungry = false;
        } else if now >= self.empty_until && now >= self.blocked_until {
            let max = self.room.min(adaptive_prefetch_size(self.capacity, self.peers));
            self.asked = Some(max);
            self.nudged = false;
            self.effects.push_back(Effect::Claim { max });
        } else {
            self.hungry = true;
            self.effects.push_back(Effect::Rest { room: std::mem::take(&mut self.room) });
        }
    }
}
