//! Indirect probes that this node makes for others.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::id::NodeId;
use crate::limits::RELAYS_MAX;
use crate::time::Instant;

/// Whoever asked for an indirect probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asker {
    pub(super) id: NodeId,
    pub(super) addr: SocketAddr,
    /// The number of its request, repeated in every answer to it.
    pub(super) seq: u32,
}

/// The indirect probes under way, by the number of the ping that each sent.
#[derive(Debug, Default)]
pub(super) struct Relays {
    by_seq: BTreeMap<u32, Relay>,
}

#[derive(Debug)]
struct Relay {
    asker: Asker,
    target: NodeId,
    /// When the asker is told that there is no answer so far; `None` once it was.
    nack_at: Option<Instant>,
    ends: Instant,
}

impl Relays {
    /// Notes that ping `seq` was sent to `target` for `asker`; returns whether there was room.
    ///
    /// The asker hears of silence while its own round still lasts: a fifth of a period leaves the
    /// rest of the second half for two trips. A late answer is relayed up to a period's end.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        period: Duration,
        seq: u32,
        target: NodeId,
        asker: Asker,
    ) -> bool {
        if self.by_seq.len() >= RELAYS_MAX {
            return false;
        }
        let (nack_at, ends) = (Some(now + period / 5), now + period);
        self.by_seq.insert(seq, Relay { asker, target, nack_at, ends });
        true
    }

    /// Ends the probe that `by` answered.
    pub(super) fn answered(&mut self, seq: u32, by: &NodeId) -> Option<Asker> {
        self.by_seq.get(&seq).filter(|relay| relay.target == *by)?;
        self.by_seq.remove(&seq).map(|relay| relay.asker)
    }

    /// Drops what has ended, and names those who are to be told that there is no answer so far.
    pub(super) fn silent(&mut self, now: Instant) -> Vec<Asker> {
        let mut due = Vec::new();
        self.by_seq.retain(|_, relay| {
            if relay.nack_at.is_some_and(|at| at <= now) {
                relay.nack_at = None;
                due.push(relay.asker.clone());
            }
            relay.ends > now
        });
        due
    }

    pub(super) fn next_at(&self) -> Option<Instant> {
        self.by_seq.values().map(|relay| relay.nack_at.unwrap_or(relay.ends)).min()
    }

    pub(super) fn clear(&mut self) {
        self.by_seq.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.by_seq.len()
    }
}
