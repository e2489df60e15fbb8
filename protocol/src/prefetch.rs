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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn at(ms: u64) -> Instant {
        Instant::from_micros(ms * 1_000)
    }

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn id(text: &str) -> NodeId {
        NodeId::new(text).unwrap()
    }

    /// Alone, with a batch of 16 and an interval of 1,041 ms.
    fn prefetcher() -> Prefetcher {
        Prefetcher::new(&id("worker-1"), PrefetchConfig::default())
    }

    fn effects(prefetcher: &mut Prefetcher) -> Vec<Effect> {
        std::iter::from_fn(|| prefetcher.poll_effect()).collect()
    }

    /// One that has found the store empty at 0 ms and gave 4 places to the thief.
    fn drained() -> Prefetcher {
        let mut prefetcher = prefetcher();
        prefetcher.handle_idle(at(0), 4);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 4 }]);
        prefetcher.handle_claimed(at(0), Ok(0));
        assert_eq!(effects(&mut prefetcher), [Effect::Drained, Effect::Rest { room: 4 }]);
        prefetcher
    }

    #[test]
    fn a_claim_is_a_quarter_of_the_deque_shared_with_the_peers() {
        let sizes = [0, 1, 2, 3, 4, 7, 15, 16, usize::MAX].map(|n| adaptive_prefetch_size(64, n));
        assert_eq!(sizes, [16, 8, 5, 4, 3, 2, 1, 1, 1]);
        let sizes = [0, 1, 3, 4, 10, 1_000].map(|capacity| adaptive_prefetch_size(capacity, 0));
        assert_eq!(sizes, [1, 1, 1, 1, 2, 250]);
    }

    #[test]
    fn jitter_is_a_nodes_own_and_under_half_a_period() {
        let period = ms(500);
        let jitters =
            ["worker-0", "worker-1", "us-east-1"].map(|node| poll_jitter(&id(node), period));
        assert_eq!(jitters, [ms(181), ms(41), ms(26)]);
        for node in 0..100 {
            assert!(poll_jitter(&id(&format!("n{node}")), period) < ms(250));
        }
        assert_eq!(poll_jitter(&id("a"), ms(1)), Duration::ZERO);
        assert_eq!(poll_jitter(&id("a"), Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn drains_the_store_and_gives_the_rest_to_the_thief() {
        let mut prefetcher = prefetcher();
        assert_eq!(prefetcher.poll_timeout(), None, "nobody wants work");
        prefetcher.handle_idle(at(0), 40);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 16 }]);
        prefetcher.handle_claimed(at(1), Ok(16));
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 16 }]);
        prefetcher.handle_peers(1);
        prefetcher.handle_claimed(at(2), Ok(16));
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 8 }]);
        prefetcher.handle_claimed(at(3), Ok(3));
        assert_eq!(effects(&mut prefetcher), [Effect::Drained, Effect::Rest { room: 5 }]);
    }

    #[test]
    fn room_that_was_filled_leaves_nothing_to_wait_for() {
        let mut prefetcher = prefetcher();
        prefetcher.handle_idle(at(0), 4);
        prefetcher.handle_claimed(at(1), Ok(4));
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 4 }]);
        assert_eq!(prefetcher.poll_timeout(), None);
        prefetcher.handle_idle(at(2), 2);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 2 }]);
    }

    #[test]
    fn a_store_known_empty_is_not_asked_before_its_time() {
        let mut prefetcher = drained();
        prefetcher.handle_idle(at(1_040), 3);
        assert_eq!(effects(&mut prefetcher), [Effect::Rest { room: 3 }]);
        prefetcher.handle_idle(at(1_041), 3);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 3 }]);
    }

    #[test]
    fn polls_while_the_deque_wants_work() {
        let mut prefetcher = drained();
        assert_eq!(prefetcher.poll_timeout(), Some(at(1_041)));
        prefetcher.handle_timeout(at(1_040));
        assert_eq!(effects(&mut prefetcher), []);
        prefetcher.handle_timeout(at(1_041));
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
        assert_eq!(prefetcher.poll_timeout(), Some(at(2_082)), "the answer may be lost");
        prefetcher.handle_timeout(at(2_082));
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
        prefetcher.handle_idle(at(2_083), 2);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 2 }]);
        assert_eq!(prefetcher.poll_timeout(), None, "a claim is under way");
        prefetcher.handle_claimed(at(2_084), Ok(0));
        assert_eq!(effects(&mut prefetcher), [Effect::Drained, Effect::Rest { room: 2 }]);
        prefetcher.handle_timeout(at(3_125));
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
        prefetcher.handle_idle(at(3_126), 0);
        assert_eq!(effects(&mut prefetcher), []);
        assert_eq!(prefetcher.poll_timeout(), None, "the deque has work, and says when not");
    }

    #[test]
    fn a_nudge_asks_for_room_once_and_claims_with_it() {
        let mut prefetcher = drained();
        prefetcher.handle_nudge(at(10));
        prefetcher.handle_nudge(at(11));
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
        prefetcher.handle_idle(at(12), 4);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 4 }]);
    }

    #[test]
    fn a_nudge_while_the_deque_is_full_is_remembered_until_it_is_not() {
        let mut prefetcher = drained();
        prefetcher.handle_nudge(at(10));
        prefetcher.handle_idle(at(11), 0);
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
        assert_eq!(prefetcher.poll_timeout(), None);
        prefetcher.handle_idle(at(500), 2);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 2 }]);
    }

    #[test]
    fn a_nudge_during_a_claim_outlives_it() {
        let mut prefetcher = prefetcher();
        prefetcher.handle_idle(at(0), 4);
        prefetcher.handle_nudge(at(1));
        prefetcher.handle_claimed(at(2), Ok(1));
        let claims = [Effect::Claim { max: 4 }, Effect::Claim { max: 3 }];
        assert_eq!(effects(&mut prefetcher), claims, "the answer may be older than the nudge");
        prefetcher.handle_claimed(at(3), Ok(1));
        assert_eq!(effects(&mut prefetcher), [Effect::Drained, Effect::Rest { room: 2 }]);
    }

    #[test]
    fn room_that_comes_during_a_claim_is_added() {
        let mut prefetcher = prefetcher();
        prefetcher.handle_idle(at(0), 4);
        prefetcher.handle_idle(at(1), 30);
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 4 }]);
        prefetcher.handle_claimed(at(2), Ok(4));
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 16 }]);
        prefetcher.handle_claimed(at(3), Ok(0));
        assert_eq!(effects(&mut prefetcher), [Effect::Drained, Effect::Rest { room: 30 }]);
    }

    #[test]
    fn failed_claims_back_off_by_doubling_and_a_nudge_does_not_hurry_them() {
        let mut prefetcher = prefetcher();
        let mut now = at(0);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            prefetcher.handle_idle(now, 4);
            prefetcher.handle_claimed(now, Err(ClaimFailed));
            assert_eq!(
                effects(&mut prefetcher),
                [Effect::Claim { max: 4 }, Effect::Rest { room: 4 }]
            );
            prefetcher.handle_nudge(now);
            prefetcher.handle_idle(now, 1);
            assert_eq!(effects(&mut prefetcher), [Effect::Rest { room: 1 }]);
            let due = prefetcher.poll_timeout().unwrap();
            pauses.push(due.saturating_since(now));
            prefetcher.handle_timeout(due);
            assert_eq!(effects(&mut prefetcher), [Effect::WantRoom]);
            now = due;
        }
        assert_eq!(pauses, [250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000].map(ms));
        prefetcher.handle_idle(now, 4);
        prefetcher.handle_claimed(now, Ok(4));
        prefetcher.handle_idle(now, 4);
        prefetcher.handle_claimed(now, Err(ClaimFailed));
        assert_eq!(prefetcher.poll_timeout(), Some(now + ms(250)), "a success ends the row");
    }

    #[test]
    fn looks_when_the_next_job_becomes_due() {
        let mut prefetcher = drained();
        prefetcher.handle_next_due(at(1), None);
        assert_eq!(prefetcher.poll_timeout(), Some(at(1_041)));
        prefetcher.handle_next_due(at(1), Some(ms(5_000)));
        assert_eq!(prefetcher.poll_timeout(), Some(at(1_041)), "never later than the poll");
        prefetcher.handle_next_due(at(1), Some(ms(300)));
        assert_eq!(prefetcher.poll_timeout(), Some(at(301)));
        prefetcher.handle_timeout(at(301));
        prefetcher.handle_idle(at(302), 4);
        assert_eq!(effects(&mut prefetcher), [Effect::WantRoom, Effect::Claim { max: 4 }]);
    }

    #[test]
    fn an_answer_without_a_claim_is_ignored_and_one_too_large_is_cut() {
        let mut prefetcher = prefetcher();
        prefetcher.handle_claimed(at(0), Ok(5));
        prefetcher.handle_claimed(at(0), Err(ClaimFailed));
        prefetcher.handle_idle(at(0), 4);
        prefetcher.handle_claimed(at(0), Ok(9));
        assert_eq!(effects(&mut prefetcher), [Effect::Claim { max: 4 }]);
        assert_eq!(prefetcher.poll_timeout(), None);
    }

    #[derive(Clone, Debug)]
    enum Input {
        Idle(usize),
        Nudge,
        Peers(usize),
        Claimed(Option<usize>),
        NextDue(Option<u64>),
        Wait(u64),
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            (0_usize..40).prop_map(Input::Idle),
            Just(Input::Nudge),
            (0_usize..10).prop_map(Input::Peers),
            prop::option::weighted(0.8, 0_usize..20).prop_map(Input::Claimed),
            prop::option::of(0_u64..3_000).prop_map(Input::NextDue),
            (0_u64..2_000).prop_map(Input::Wait),
        ]
    }

    proptest! {
        /// Every place lent leaves once; one claim at a time, none while the store is known empty;
        /// and no wake-up is lost: after a nudge, no room goes to the thief before a claim that began
        /// after the nudge has come back short (or claims fail).
        #[test]
        fn room_is_conserved_and_no_wake_up_is_lost(inputs in prop::collection::vec(input(), 1..200)) {
            let mut prefetcher = prefetcher();
            let mut now = at(0);
            let (mut lent, mut filled, mut rested) = (0, 0, 0);
            let mut under_way: Option<usize> = None;
            // A nudge that no claim has answered yet; claims that began before it do not.
            let (mut unanswered, mut answering) = (false, false);
            let mut failing_until = now;
            // The deque wants work, and only a look at the store can find it.
            let mut wanted = false;
            for input in inputs {
                match input {
                    Input::Idle(room) => {
                        lent += room;
                        wanted = room > 0;
                        prefetcher.handle_idle(now, room);
                    }
                    Input::Nudge => {
                        (unanswered, answering) = (true, false);
                        wanted = true;
                        prefetcher.handle_nudge(now);
                    }
                    Input::Peers(peers) => prefetcher.handle_peers(peers),
                    Input::Claimed(got) => {
                        let Some(asked) = under_way.take() else { continue };
                        let got = got.map(|got| got.min(asked));
                        filled += got.unwrap_or(0);
                        if answering && got.is_some_and(|got| got < asked) {
                            unanswered = false;
                        }
                        wanted = prefetcher.room > got.unwrap_or(0);
                        failing_until = if got.is_none() { now + CLAIM_BACKOFF_MAX } else { now };
                        prefetcher.handle_claimed(now, got.ok_or(ClaimFailed));
                    }
                    Input::NextDue(after) => prefetcher.handle_next_due(now, after.map(ms)),
                    Input::Wait(wait) => {
                        now = now + ms(wait);
                        prefetcher.handle_timeout(now);
                    }
                }
                while let Some(effect) = prefetcher.poll_effect() {
                    match effect {
                        Effect::Claim { max } => {
                            prop_assert!(under_way.replace(max).is_none(), "one at a time");
                            prop_assert!(max > 0 && max <= 16);
                            answering = unanswered;
                        }
                        Effect::Rest { room } => {
                            prop_assert!(room > 0);
                            prop_assert!(!unanswered || now <= failing_until);
                            rested += room;
                        }
                        Effect::WantRoom => prop_assert!(under_way.is_none()),
                        Effect::Drained => {}
                    }
                }
                let in_hand = lent - filled - rested;
                prop_assert_eq!(prefetcher.room, in_hand);
                prop_assert_eq!(in_hand > 0, under_way.is_some(), "room only for a claim under way");
                prop_assert_eq!(prefetcher.poll_timeout().is_some(), wanted && under_way.is_none());
            }
        }
    }
}
