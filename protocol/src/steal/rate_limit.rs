//! How often one peer may ask to steal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::id::NodeId;
use crate::limits::{RATE_LIMIT_PEERS_MAX, STEAL_RATE_MAX};
use crate::time::Instant;

const WINDOW: Duration = Duration::from_secs(1);

/// A sliding window of one second a peer.
///
/// Only requests that were let through count, so a peer that does not listen still gets its share. A
/// peer that was silent for a second is forgotten; beyond [`RATE_LIMIT_PEERS_MAX`] the one whose last
/// request is oldest.
#[derive(Clone, Debug)]
pub struct RateLimit {
    per_second: usize,
    windows: BTreeMap<NodeId, VecDeque<Instant>>,
    by_last: BTreeSet<(Instant, NodeId)>,
}

impl RateLimit {
    /// Lets `per_second` requests of each peer through, at most [`STEAL_RATE_MAX`]. 0: all.
    pub fn new(per_second: u32) -> Self {
        Self {
            per_second: per_second.min(STEAL_RATE_MAX) as usize,
            windows: BTreeMap::new(),
            by_last: BTreeSet::new(),
        }
    }

    /// Whether a request of `peer` may be served now.
    pub fn allow(&mut self, now: Instant, peer: &NodeId) -> bool {
        if self.per_second == 0 {
            return true;
        }
        while self.by_last.first().is_some_and(|(last, _)| is_past(now, *last)) {
            self.forget_oldest();
        }
        if !self.windows.contains_key(peer) && self.windows.len() >= RATE_LIMIT_PEERS_MAX {
            self.forget_oldest();
        }
        let window = self.windows.entry(peer.clone()).or_default();
        while window.front().is_some_and(|&at| is_past(now, at)) {
            window.pop_front();
        }
        if window.len() >= self.per_second {
            return false;
        }
        if let Some(&last) = window.back() {
            self.by_last.remove(&(last, peer.clone()));
        }
        window.push_back(now);
        self.by_last.insert((now, peer.clone()));
        true
    }

    /// Peers that have a window.
    pub fn peers(&self) -> usize {
        self.windows.len()
    }

    fn forget_oldest(&mut self) {
        if let Some((_, peer)) = self.by_last.pop_first() {
            self.windows.remove(&peer);
        }
    }
}

fn is_past(now: Instant, at: Instant) -> bool {
    now.saturating_since(at) >= WINDOW
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deque::fixtures::{at_ms, node};

    #[test]
    fn the_window_slides() {
        let mut limit = RateLimit::new(2);
        let (a, b) = (node("a"), node("b"));
        let asked = [(0, &a), (600, &a), (700, &a), (700, &b), (999, &a), (1_000, &a), (1_100, &a)];
        let allowed = asked.map(|(ms, peer)| limit.allow(at_ms(ms), peer));
        assert_eq!(allowed, [true, true, false, true, false, true, false]);
        assert!(limit.allow(at_ms(1_600), &a), "refused requests do not count");
    }

    #[test]
    fn zero_is_no_limit() {
        let mut limit = RateLimit::new(0);
        assert!((0..1_000).all(|_| limit.allow(at_ms(0), &node("a"))));
        assert_eq!(limit.peers(), 0);
    }

    #[test]
    fn silent_peers_are_forgotten_and_never_more_than_the_bound_are_known() {
        let mut limit = RateLimit::new(10);
        for n in 0..2 * RATE_LIMIT_PEERS_MAX {
            assert!(limit.allow(at_ms(0), &node(&format!("n{n}"))));
        }
        assert_eq!(limit.peers(), RATE_LIMIT_PEERS_MAX);
        limit.allow(at_ms(1_000), &node("a"));
        assert_eq!(limit.peers(), 1);
    }
}
