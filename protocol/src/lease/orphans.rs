use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::LeaseConfig;
use crate::job::Claim;
use crate::limits::ORPHANS_MAX;
use crate::time::Instant;

/// What is to be done about claims without memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrphansEffect {
    /// List this node's own unstarted claims in the store, and answer with
    /// [`Orphans::handle_listed`]. A listing that fails needs no answer.
    List,
    /// Take these up again.
    Readopt {
        /// As listed.
        claims: Vec<Claim>,
    },
}

/// Finds claims that the store has for this node and that the node does not know of, because the
/// answer that told of them was lost.
///
/// An answer that is only late must not be overtaken: a claim is an orphan when it was unknown in
/// two listings on end, half a term apart or more.
///
/// After each input: [`Orphans::poll_effect`] until `None`, then [`Orphans::poll_timeout`] says when
/// to call [`Orphans::handle_timeout`].
#[derive(Debug)]
pub struct Orphans {
    config: LeaseConfig,
    /// Claims that the last listing had and nobody knew, with the time they were first seen so.
    unknown: BTreeMap<Claim, Instant>,
    next_list: Instant,
    effects: VecDeque<OrphansEffect>,
}

impl Orphans {
    /// For a boot that has just begun: the first listing is due in a term.
    pub fn new(config: LeaseConfig, now: Instant) -> Self {
        Self {
            config,
            unknown: BTreeMap::new(),
            next_list: now + config.term(),
            effects: VecDeque::new(),
        }
    }

    /// A listing arrived; `is_known` says whether a claim is in the deque or in
    /// transit. At most [`ORPHANS_MAX`] unknown claims are remembered.
    pub fn handle_listed(
        &mut self,
        now: Instant,
        listed: impl IntoIterator<Item = Claim>,
        is_known: impl Fn(&Claim) -> bool,
    ) {
        let mut still = BTreeSet::new();
        for claim in listed {
            if !is_known(&claim) {
                still.insert(claim);
                if still.len() > ORPHANS_MAX {
                    still.pop_last();
                }
            }
        }
        let first_seen = |claim: &Claim| self.unknown.get(claim).copied();
        let ripe = |claim: &Claim| {
            first_seen(claim).is_some_and(|since| now >= since + self.config.term() / 2)
        };
        let claims: Vec<Claim> = still.iter().copied().filter(ripe).collect();
        self.unknown =
            still.iter().map(|claim| (*claim, first_seen(claim).unwrap_or(now))).collect();
        if !claims.is_empty() {
            self.effects.push_back(OrphansEffect::Readopt { claims });
        }
    }

    /// When [`Orphans::handle_timeout`] is due at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        Some(self.next_list)
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if now >= self.next_list {
            self.next_list = now + self.config.term();
            self.effects.push_back(OrphansEffect::List);
        }
    }

    /// The next thing to do, oldest first.
    pub fn poll_effect(&mut self) -> Option<OrphansEffect> {
        self.effects.pop_front()
    }
}
