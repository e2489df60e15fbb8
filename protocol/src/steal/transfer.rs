//! From an offer to its settlement: what is transferred in the store, and what is read back when the
//! store's answer is lost.

use std::collections::{BTreeMap, BTreeSet};

use super::thief::Effect;
use crate::id::{JobId, Owner};
use crate::job::{Claim, ClaimedJob};
use crate::limits::{READ_BACK_TRIES_MAX, TRANSFER_TIMEOUT};
use crate::time::Instant;
use crate::wire::stream::OfferedJob;

/// Why the store did not say what a transfer, or a reading back, came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The store is as it was before, for certain.
    #[error("the store did not do it")]
    Undone,
    /// It may have been done.
    #[error("the store's answer was lost")]
    Unknown,
}

/// A claim that the store moved to this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The job, with the token that this node now holds.
    pub claim: Claim,
    /// The whole job, if it was asked for.
    pub job: Option<ClaimedJob>,
}

/// An offer, by its victim's boot and its number there.
pub(super) type Key = (Owner, u64);

#[derive(Clone, Debug)]
struct Transfer {
    jobs: BTreeMap<JobId, OfferedJob>,
    sent: Instant,
    /// When the store's answer is overdue.
    deadline: Instant,
    /// Readings back so far; 0 while the transfer's own answer is awaited.
    tries: u32,
}

impl Transfer {
    /// What this node holds if the transfer was done.
    fn claims_after(&self) -> impl Iterator<Item = Claim> + '_ {
        self.jobs.values().map(|offered| {
            let claim = offered.claim();
            Claim { token: claim.token.next(), ..claim }
        })
    }
}

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Concluded {
    /// How many jobs were offered: the room that was kept for them.
    pub(super) offered: usize,
    /// What is this node's by the store.
    pub(super) taken: Vec<JobId>,
    /// Of these, the jobs that it can run.
    pub(super) jobs: Vec<ClaimedJob>,
    /// When the transfer was sent.
    pub(super) sent: Instant,
}

/// The transfers under way; bounded by the room that was lent for them.
#[derive(Clone, Debug, Default)]
pub(super) struct Transfers {
    under_way: BTreeMap<Key, Transfer>,
}

impl Transfers {
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    pub(super) fn contains(&self, key: &Key) -> bool {
        self.under_way.contains_key(key)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.under_way.values().map(|transfer| transfer.deadline).min()
    }

    /// Begins the transfer of `jobs`.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        key: Key,
        jobs: BTreeMap<JobId, OfferedJob>,
    ) -> Effect {
        let named = |offered: &&OfferedJob| !matches!(offered, OfferedJob::Whole(_));
        let effect = Effect::Transfer {
            victim: key.0.clone(),
            offer: key.1,
            claims: jobs.values().map(OfferedJob::claim).collect(),
            fetch: jobs.values().filter(named).map(|offered| offered.claim().job).collect(),
        };
        let transfer = Transfer { jobs, sent: now, deadline: now + TRANSFER_TIMEOUT, tries: 0 };
        self.under_way.insert(key, transfer);
        effect
    }

    /// The store's answer to the transfer itself, however late. An answer that was lost leads to a
    /// reading back.
    pub(super) fn answered(
        &mut self,
        now: Instant,
        key: &Key,
        moved: Result<Vec<Moved>, TransferError>,
    ) -> Result<Concluded, Option<Effect>> {
        match moved {
            Ok(moved) => self.conclude(key, moved).ok_or(None),
            Err(_) if self.under_way.get(key).is_none_or(|transfer| transfer.tries > 0) => {
                Err(None)
            }
            Err(TransferError::Undone) => self.conclude(key, Vec::new()).ok_or(None),
            Err(TransferError::Unknown) => Err(self.read_back(now, key).ok()),
        }
    }

    /// The unstarted claims that this node holds, read after the transfer was sent: those of the
    /// offer, with the next token, came by it.
    pub(super) fn read(&mut self, key: &Key, held: &BTreeSet<Claim>) -> Option<Concluded> {
        let transfer = self.under_way.get(key).filter(|transfer| transfer.tries > 0)?;
        let moved = transfer
            .claims_after()
            .filter(|claim| held.contains(claim))
            .map(|claim| Moved { claim, job: None })
            .collect();
        self.conclude(key, moved)
    }

    /// For each answer that is overdue: the reading back to ask for, or the room that was kept for a
    /// transfer that is given up.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> Vec<Result<Effect, usize>> {
        let overdue = |transfer: &Transfer| transfer.deadline <= now;
        let keys: Vec<Key> = self
            .under_way
            .iter()
            .filter(|(_, transfer)| overdue(transfer))
            .map(|(key, _)| key.clone())
            .collect();
        keys.iter().map(|key| self.read_back(now, key)).collect()
    }

    /// Forgets all transfers; returns the room that was kept for them.
    pub(super) fn clear(&mut self) -> usize {
        let kept = self.under_way.values().map(|transfer| transfer.jobs.len()).sum();
        self.under_way.clear();
        kept
    }

    fn read_back(&mut self, now: Instant, key: &Key) -> Result<Effect, usize> {
        let Some(transfer) = self.under_way.get_mut(key) else { return Err(0) };
        if transfer.tries >= READ_BACK_TRIES_MAX {
            let kept = transfer.jobs.len();
            self.under_way.remove(key);
            return Err(kept);
        }
        transfer.tries += 1;
        transfer.deadline = now + TRANSFER_TIMEOUT;
        let claims = transfer.claims_after().collect();
        Ok(Effect::ReadBack { victim: key.0.clone(), offer: key.1, claims })
    }

    fn conclude(&mut self, key: &Key, moved: Vec<Moved>) -> Option<Concluded> {
        let Transfer { jobs: mut offered, sent, .. } = self.under_way.remove(key)?;
        let mut concluded =
            Concluded { offered: offered.len(), taken: Vec::new(), jobs: Vec::new(), sent };
        for Moved { claim, job } in moved {
            let Some(known) = offered.remove(&claim.job) else { continue };
            concluded.taken.push(claim.job);
            let whole = match known {
                OfferedJob::Whole(job) => Some(job),
                // Without the whole job it is this node's by the store alone: the node readopts it
                // when it next lists its claims.
                OfferedJob::Named(_) => job.filter(|job| job.spec.id == claim.job),
            };
            concluded.jobs.extend(whole.map(|job| ClaimedJob { token: claim.token, ..job }));
        }
        Some(concluded)
    }
}
