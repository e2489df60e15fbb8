//! Lifelines: peers that asked in vain and are told when there is work.
//!
//! A thief with nobody to ask registers with a few fixed peers, one request each, and is silent from
//! then on. Source: Saraswat, Kambadur, Kodali, Grove, Krishnamoorthy, *Lifeline-based global load
//! balancing* (PPoPP 2011). There the lifeline pushes work; here it sends a hint, and the thief
//! steals as usual, for it knows what the trip costs and the victim does not.

use std::collections::VecDeque;

use crate::id::NodeId;
use crate::limits::HINT_AGAIN;
use crate::time::Instant;

#[derive(Clone, Debug)]
struct Lifeline {
    thief: NodeId,
    told: u32,
    told_at: Instant,
}

/// The peers that asked this node in vain, oldest first; bounded, the oldest is forgotten first.
///
/// A peer is forgotten when it asks again and gets something, or is dead; not when it is hinted, for
/// a hint may be lost, or too small to be worth the trip. It is hinted again when twice as much is to
/// be had as it was told, or after [`HINT_AGAIN`]: at most a logarithm of the capacity a second.
#[derive(Clone, Debug)]
pub struct Lifelines {
    max: usize,
    waiting: VecDeque<Lifeline>,
}

impl Lifelines {
    /// Remembers at most `max` peers.
    pub fn new(max: usize) -> Self {
        Self { max, waiting: VecDeque::new() }
    }

    /// Peers remembered.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// `thief` asked and got nothing.
    pub fn remember(&mut self, thief: &NodeId) {
        self.forget(thief);
        if self.max == 0 {
            return;
        }
        if self.waiting.len() >= self.max {
            self.waiting.pop_front();
        }
        let lifeline = Lifeline { thief: thief.clone(), told: 0, told_at: Instant::ZERO };
        self.waiting.push_back(lifeline);
    }

    /// `node` does not wait any more.
    pub fn forget(&mut self, node: &NodeId) {
        self.waiting.retain(|lifeline| lifeline.thief != *node);
    }

    /// Whom to tell that `stealable` jobs can be had: no more peers than jobs, the longest waiting
    /// first.
    pub fn hints(&mut self, now: Instant, stealable: u32) -> Vec<NodeId> {
        let news = |lifeline: &&mut Lifeline| {
            lifeline.told == 0
                || stealable >= lifeline.told.saturating_mul(2)
                || now.saturating_since(lifeline.told_at) >= HINT_AGAIN
        };
        self.waiting
            .iter_mut()
            .filter(news)
            .take(stealable as usize)
            .map(|lifeline| {
                lifeline.told = stealable;
                lifeline.told_at = now;
                lifeline.thief.clone()
            })
            .collect()
    }
}

/// The peers that the node at `me` of the sorted `ids` registers with: those 1, 2, 4, .. places on,
/// around. `ceil(log2 n)` of them, one at least if there is anyone else; the graph is connected, and
/// work from anywhere reaches everyone in as many hops.
pub fn lifelines_of(me: usize, ids: &[NodeId]) -> Vec<NodeId> {
    let n = ids.len();
    let mut step = 1;
    let mut peers = Vec::new();
    while step < n {
        peers.push(ids[(me + step) % n].clone());
        step *= 2;
    }
    peers
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::deque::fixtures::{at_ms, node};

    fn ids(n: usize) -> Vec<NodeId> {
        (0..n).map(|i| node(&format!("n{i:03}"))).collect()
    }

    #[test]
    fn who_waits_longest_is_hinted_first_and_no_more_than_there_are_jobs() {
        let mut lifelines = Lifelines::new(3);
        for id in ids(4) {
            lifelines.remember(&id);
        }
        let [_, n1, n2, n3] = ids(4).try_into().unwrap();
        assert_eq!(lifelines.len(), 3, "the oldest is forgotten");
        assert_eq!(lifelines.hints(at_ms(0), 0), []);
        assert_eq!(lifelines.hints(at_ms(0), 2), [n1.clone(), n2.clone()]);
        assert_eq!(lifelines.hints(at_ms(1), 3), std::slice::from_ref(&n3));
        assert_eq!(
            lifelines.hints(at_ms(2), 5),
            [n1.clone(), n2.clone()],
            "twice what they were told"
        );
        assert_eq!(lifelines.hints(at_ms(2), 6), std::slice::from_ref(&n3));
        assert_eq!(lifelines.hints(at_ms(2), 7), []);
        assert_eq!(lifelines.hints(at_ms(1_002), 1), std::slice::from_ref(&n1), "a second later");
        lifelines.remember(&n1);
        lifelines.forget(&n3);
        assert_eq!(lifelines.hints(at_ms(1_003), 3), [n2, n1], "it asked again: all is news to it");
    }

    #[test]
    fn a_declined_lifeline_is_hinted_a_logarithm_of_times_a_second() {
        let mut lifelines = Lifelines::new(1);
        lifelines.remember(&node("t"));
        let hints: usize = (1..=1_024).map(|n| lifelines.hints(at_ms(0), n).len()).sum();
        assert_eq!(hints, 11);
    }

    #[test]
    fn each_node_has_log_n_lifelines_and_all_reach_all() {
        assert_eq!(lifelines_of(0, &ids(1)), []);
        for n in 2..70 {
            let ids = ids(n);
            let mut reached = BTreeSet::from([ids[0].clone()]);
            let mut hops = 0;
            while reached.len() < n {
                let next: Vec<NodeId> = reached
                    .iter()
                    .flat_map(|id| lifelines_of(ids.binary_search(id).unwrap(), &ids))
                    .collect();
                reached.extend(next);
                hops += 1;
            }
            let log = (n as f64).log2().ceil() as usize;
            assert!(hops <= log, "{n} nodes in {hops} hops");
            for me in 0..n {
                let lifelines = lifelines_of(me, &ids);
                assert_eq!(lifelines.len(), log.max(1));
                assert!(!lifelines.contains(&ids[me]));
            }
        }
    }
}
