use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::LeaseConfig;
use crate::id::{NodeId, Owner};
use crate::limits::LEASES_MAX;
use crate::time::{Instant, micros};

/// What became of a reaping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapOutcome {
    /// The lease is ended.
    Reaped,
    /// It was renewed meanwhile, or ended by another node.
    Moved,
    /// The store did not answer, or failed.
    Failed,
}

/// What a reaper is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObserverEffect {
    /// List the leases, and answer with [`Observer::handle_leases`]. A scan that fails needs no
    /// answer: the next comes by itself.
    Scan,
    /// End this lease if it still has these renewals, and answer with [`Observer::handle_reaped`].
    Reap {
        /// Whose.
        owner: Owner,
        /// As observed.
        renewals: u64,
    },
}

/// The reaper's side: watches all leases but its own.
///
/// After each input: [`Observer::poll_effect`] until `None`, then [`Observer::poll_timeout`] says
/// when to call [`Observer::handle_timeout`].
///
/// It trusts only what it saw: a lease is due when its renewals were the same in every listing for
/// [`LeaseConfig::unchanged`], counted by this clock from the moment when the first of them had
/// arrived. What gossip says of a node makes it look, never reap.
#[derive(Debug)]
pub struct Observer {
    config: LeaseConfig,
    me: Owner,
    rng: fastrand::Rng,
    seen: BTreeMap<Owner, Seen>,
    next_scan: Instant,
    /// The earliest time for the next scan, whoever asks for it.
    scan_floor: Instant,
    effects: VecDeque<ObserverEffect>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    renewals: u64,
    since: Instant,
    /// No other reaping is sent before this.
    reap_floor: Instant,
}

impl Observer {
    /// An observer on the node and boot `me`, whose first scan is due at once. `seed` spreads the
    /// scans of many observers.
    pub fn new(config: LeaseConfig, me: Owner, seed: u64, now: Instant) -> Self {
        Self {
            config,
            me,
            rng: fastrand::Rng::with_seed(seed),
            seen: BTreeMap::new(),
            next_scan: now,
            scan_floor: now,
            effects: VecDeque::new(),
        }
    }

    /// A listing of all leases that are not ended: owner and renewals. It arrived at `now`.
    ///
    /// Of more than [`LEASES_MAX`] the first by owner are followed.
    pub fn handle_leases(&mut self, now: Instant, leases: impl IntoIterator<Item = (Owner, u64)>) {
        let mut listed: BTreeMap<Owner, Seen> = BTreeMap::new();
        for (owner, renewals) in leases {
            if owner == self.me {
                continue;
            }
            let seen = match self.seen.get(&owner) {
                // Renewals only grow: a listing with fewer was overtaken by a newer one.
                Some(&seen) if seen.renewals >= renewals => seen,
                _ => Seen { renewals, since: now, reap_floor: Instant::ZERO },
            };
            listed.insert(owner, seen);
            if listed.len() > LEASES_MAX {
                listed.pop_last();
            }
        }
        let (unchanged, again) = (self.config.unchanged(), self.config.period());
        for (owner, seen) in &mut listed {
            if now >= seen.since + unchanged && now >= seen.reap_floor {
                seen.reap_floor = now + again;
                let renewals = seen.renewals;
                self.effects.push_back(ObserverEffect::Reap { owner: owner.clone(), renewals });
            }
        }
        self.seen = listed;
    }

    /// What became of an [`ObserverEffect::Reap`].
    pub fn handle_reaped(&mut self, now: Instant, owner: &Owner, outcome: ReapOutcome) {
        match outcome {
            ReapOutcome::Reaped | ReapOutcome::Moved => {
                self.seen.remove(owner);
            }
            ReapOutcome::Failed => {
                if let Some(seen) = self.seen.get_mut(owner) {
                    seen.reap_floor = now + self.config.spacing();
                }
            }
        }
    }

    /// Gossip says that `node` is dead: scans as soon as the spacing of scans allows, so that the
    /// term of its last renewal is counted from now if it was not before.
    pub fn handle_member_dead(&mut self, now: Instant, node: &NodeId) {
        if *node != self.me.node {
            self.next_scan = self.next_scan.min(now);
            self.handle_timeout(now);
        }
    }

    /// This node has a new boot: its old one's lease is watched like any other.
    pub fn handle_registered(&mut self, me: Owner) {
        self.seen.remove(&me);
        self.me = me;
    }

    /// When [`Observer::handle_timeout`] is due at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        Some(self.next_scan.min(self.next_due()).max(self.scan_floor))
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|due| now < due) {
            return;
        }
        self.scan_floor = now + self.config.spacing();
        self.next_scan = now + self.jittered(self.config.period());
        self.effects.push_back(ObserverEffect::Scan);
    }

    /// The next thing to do, oldest first.
    pub fn poll_effect(&mut self) -> Option<ObserverEffect> {
        self.effects.pop_front()
    }

    /// When the first lease will have stood still for long enough, if it is not renewed.
    fn next_due(&self) -> Instant {
        let unchanged = self.config.unchanged();
        let due = self.seen.values().map(|seen| (seen.since + unchanged).max(seen.reap_floor));
        due.min().unwrap_or(Instant::FAR_FUTURE)
    }

    /// `period` less up to a quarter: the scans of two observers that started together drift apart.
    fn jittered(&mut self, period: Duration) -> Duration {
        period - Duration::from_micros(self.rng.u64(..=micros(period) / 4))
    }
}
