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
