//! Jobs and leases in memory, and every change that a store makes to them.
//!
//! Invariant: [`JobTable::put`] is the one place that changes a row's state or owner, so each row
//! stands in exactly the orders that its state calls for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use meshwork_protocol::id::{FencingToken, Generation, JobId, NodeId, Owner};
use meshwork_protocol::job::{Claim, ClaimedJob, Disposition, JobSpec, JobState, Recorded};
use meshwork_protocol::time::micros;

use crate::store::limits::{CLAIM_MAX, PROMOTE_MAX, REMEMBERED_MAX, UNFINISHED_MAX};
use crate::store::messages::*;
use crate::store::rules::{
    CrashRule, INTERRUPTED, Interruption, NUMBER_MAX, first_state, next_generation,
};

/// Jobs and leases in memory. Each method is what the message of its name asks.
#[derive(Debug, Default)]
pub struct JobTable {
    crash_rule: CrashRule,
    nodes: BTreeMap<NodeId, LeaseRow>,
    rows: HashMap<u64, Row>,
    seqs: HashMap<JobId, u64>,
    next_seq: u64,
    counts: Counts,
    /// Queued, by affinity.
    due_of: BTreeMap<NodeId, BTreeSet<Place>>,
    /// Queued.
    due: BTreeSet<Place>,
    /// Scheduled and failed, by the time they become due.
    later: BTreeSet<(u64, u64)>,
    /// Claimed and running, by who holds them.
    held: BTreeMap<NodeId, BTreeSet<u64>>,
    /// Final, oldest first.
    finished: VecDeque<u64>,
}

/// A job's place among those that are due: by priority, then by age.
type Place = (Reverse<i16>, u64, u64);

#[derive(Debug)]
struct Row {
    spec: Arc<JobSpec>,
    affinity: NodeId,
    state: JobState,
    due_ms: u64,
    /// Who holds it, if it is claimed or running. A node's older boots hold nothing: registering a
    /// new one requeues their jobs.
    owner: Option<NodeId>,
    token: FencingToken,
    attempts: u32,
    crashes: u32,
    error: Option<String>,
    result: Option<Arc<str>>,
}

impl Row {
    fn claimed(&self) -> ClaimedJob {
        ClaimedJob { spec: self.spec.clone(), token: self.token, attempt: self.attempts + 1 }
    }
}

/// What was made of the jobs of a boot that ended.
#[derive(Default)]
struct Orphans {
    buffered: Vec<JobId>,
    interrupted: Vec<JobId>,
    dead: Vec<JobId>,
}

impl JobTable {
    /// An empty table.
    pub fn new(crash_rule: CrashRule) -> Self {
        Self { crash_rule, ..Self::default() }
    }

    /// See [`Insert`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`], or [`StoreError::Busy`] when the table is full.
    pub fn insert(&mut self, now_ms: u64, m: &Insert) -> StoreResult<Vec<Inserted>> {
        if m.jobs.iter().any(|job| job.claim) {
            self.check_live(&m.owner)?;
        }
        let unfinished = self.rows.len() - self.finished.len();
        if unfinished + m.jobs.len() > UNFINISHED_MAX {
            return Err(StoreError::Busy(format!("{unfinished} jobs are unfinished")));
        }
        Ok(m.jobs.iter().map(|job| self.insert_one(now_ms, &m.owner, job)).collect())
    }

    fn insert_one(&mut self, now_ms: u64, owner: &Owner, job: &NewJob) -> Inserted {
        if self.seqs.contains_key(&job.spec.id) {
            return Inserted::Duplicate;
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        let (first, due_ms) = first_state(&job.spec, now_ms);
        let claim = job.claim && first == JobState::Queued;
        let row = Row {
            spec: job.spec.clone(),
            affinity: job.affinity.clone(),
            state: if claim { JobState::Claimed } else { first },
            due_ms,
            owner: claim.then(|| owner.node.clone()),
            token: FencingToken(u64::from(claim)),
            attempts: 0,
            crashes: 0,
            error: None,
            result: None,
        };
        let token = row.token;
        self.seqs.insert(job.spec.id, seq);
        self.put(seq, row);
        if claim { Inserted::Claimed(token) } else { Inserted::Unclaimed }
    }

    /// See [`ClaimDue`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn claim(&mut self, now_ms: u64, m: &ClaimDue) -> StoreResult<Vec<ClaimedJob>> {
        self.check_live(&m.owner)?;
        self.promote(now_ms);
        let max = m.max.min(CLAIM_MAX);
        let own = self.due_of.get(&m.owner.node).into_iter().flatten().take(max);
        let mut seqs: Vec<u64> = own.map(|&(_, _, seq)| seq).collect();
        let mut claimed = self.claim_rows(&m.owner.node, &seqs);
        if !m.own_only {
            seqs.clear();
            seqs.extend(self.due.iter().take(max - claimed.len()).map(|&(_, _, seq)| seq));
            claimed.extend(self.claim_rows(&m.owner.node, &seqs));
        }
        Ok(claimed)
    }

    fn claim_rows(&mut self, node: &NodeId, seqs: &[u64]) -> Vec<ClaimedJob> {
        seqs.iter()
            .filter_map(|&seq| {
                self.change(seq, |row| {
                    row.state = JobState::Claimed;
                    row.owner = Some(node.clone());
                    row.token = row.token.next();
                    row.claimed()
                })
            })
            .collect()
    }

    fn promote(&mut self, now_ms: u64) {
        let due = self.later.range(..=(now_ms, u64::MAX)).take(PROMOTE_MAX);
        let seqs: Vec<u64> = due.map(|&(_, seq)| seq).collect();
        for seq in seqs {
            self.change(seq, |row| row.state = JobState::Queued);
        }
    }

    /// See [`Start`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn start(&mut self, m: &Start) -> StoreResult<Vec<bool>> {
        self.check_live(&m.owner)?;
        let start = |row: &mut Row| {
            row.state = JobState::Running;
            row.attempts += 1;
        };
        Ok(m.claims
            .iter()
            .map(|claim| self.change_unstarted(&m.owner, claim, start).is_some())
            .collect())
    }

    /// See [`Finish`].
    pub fn finish(&mut self, now_ms: u64, m: &Finish) -> Vec<bool> {
        m.ended.iter().map(|ended| self.finish_one(now_ms, ended)).collect()
    }

    fn finish_one(&mut self, now_ms: u64, ended: &Ended) -> bool {
        let running = |row: &Row| row.state == JobState::Running && row.token == ended.claim.token;
        let finished = self.change_if(&ended.claim.job, running, |row| match &ended.disposition {
            Disposition::Succeeded(result) => {
                row.state = JobState::Succeeded;
                row.error = None;
                row.result = Some(result.clone());
            }
            Disposition::RetryAfter { delay, error } => {
                row.state = JobState::Failed;
                row.owner = None;
                row.due_ms = now_ms.saturating_add(micros(*delay).div_ceil(1_000)).min(NUMBER_MAX);
                row.error = Some(error.clone());
            }
            Disposition::Dead(error) => {
                row.state = JobState::Dead;
                row.error = Some(error.clone());
            }
        });
        finished.is_some()
    }

    /// See [`Transfer`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] of the thief.
    pub fn transfer(&mut self, m: &Transfer) -> StoreResult<Vec<Transferred>> {
        self.check_live(&m.to)?;
        let to = Some(m.to.node.clone());
        let moved = m.claims.iter().filter_map(|claim| {
            let job = self.change_unstarted(&m.from, claim, |row| {
                row.owner.clone_from(&to);
                row.token = row.token.next();
                row.claimed()
            })?;
            let claim = job.claim();
            Some(Transferred { claim, job: m.fetch.contains(&claim.job).then_some(job) })
        });
        Ok(moved.collect())
    }

    /// See [`Retake`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn retake(&mut self, m: &Retake) -> StoreResult<Vec<Claim>> {
        let retaken = self.renew_claims(&m.owner, &m.claims)?;
        Ok(retaken.iter().map(ClaimedJob::claim).collect())
    }

    /// See [`Readopt`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn readopt(&mut self, m: &Readopt) -> StoreResult<Vec<ClaimedJob>> {
        self.renew_claims(&m.owner, &m.claims)
    }

    fn renew_claims(&mut self, owner: &Owner, claims: &[Claim]) -> StoreResult<Vec<ClaimedJob>> {
        self.check_live(owner)?;
        let renew = |row: &mut Row| {
            row.token = row.token.next();
            row.claimed()
        };
        Ok(claims.iter().filter_map(|c| self.change_unstarted(owner, c, renew)).collect())
    }

    /// See [`Release`].
    pub fn release(&mut self, m: &Release) -> usize {
        let release = |row: &mut Row| {
            row.state = JobState::Queued;
            row.owner = None;
            row.token = row.token.next();
            if let Some(to) = &m.to {
                row.affinity = to.clone();
            }
        };
        m.claims.iter().filter_map(|c| self.change_unstarted(&m.owner, c, release)).count()
    }

    /// See [`Register`].
    ///
    /// # Errors
    /// [`StoreError::Unusable`] when no greater generation can be stored.
    pub fn register(&mut self, m: &Register) -> StoreResult<Registered> {
        let previous = self.nodes.get(&m.node).map_or(0, |row| row.owner.generation.0);
        if m.over.is_some_and(|over| over.0 != previous) {
            return Err(StoreError::Taken(m.node.clone(), Generation(previous)));
        }
        let generation = next_generation(previous, m.at_least)?;
        let orphans = self.orphan(&m.node, true);
        let lease = LeaseRow {
            owner: Owner { node: m.node.clone(), generation },
            renewals: 0,
            reaped: false,
            gossip: m.gossip,
        };
        self.nodes.insert(m.node.clone(), lease);
        let requeued = [orphans.buffered, orphans.interrupted].concat();
        Ok(Registered { generation, requeued, dead: orphans.dead })
    }

    /// See [`LeaseOf`].
    pub fn lease_of(&self, node: &NodeId) -> Option<LeaseRow> {
        self.nodes.get(node).cloned()
    }

    /// See [`Renew`].
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn renew(&mut self, m: &Renew) -> StoreResult<()> {
        let lease =
            self.live_mut(&m.owner).ok_or_else(|| StoreError::LeaseLost(m.owner.clone()))?;
        lease.renewals += 1;
        Ok(())
    }

    /// See [`Leases`].
    pub fn leases(&self) -> Vec<LeaseRow> {
        self.nodes.values().filter(|row| !row.reaped).cloned().collect()
    }

    /// See [`Reap`].
    pub fn reap(&mut self, m: &Reap) -> Option<Reaped> {
        let lease = self.live_mut(&m.owner).filter(|lease| lease.renewals == m.renewals)?;
        lease.reaped = true;
        let Orphans { buffered, interrupted, dead } = self.orphan(&m.owner.node, true);
        Some(Reaped { buffered, interrupted, dead })
    }

    /// See [`Retire`].
    pub fn retire(&mut self, owner: &Owner) -> usize {
        let Some(lease) = self.live_mut(owner) else { return 0 };
        lease.reaped = true;
        let orphans = self.orphan(&owner.node, false);
        orphans.buffered.len() + orphans.interrupted.len()
    }

    /// Takes from `node` everything that it holds.
    fn orphan(&mut self, node: &NodeId, crashed: bool) -> Orphans {
        let mut orphans = Orphans::default();
        let rule = self.crash_rule;
        let held: Vec<u64> = self.held.get(node).into_iter().flatten().copied().collect();
        for seq in held {
            self.change(seq, |row| {
                let was_running = row.state == JobState::Running;
                row.state = JobState::Queued;
                row.token = row.token.next();
                row.owner = None;
                if !was_running {
                    orphans.buffered.push(row.spec.id);
                    return;
                }
                if crashed {
                    row.crashes += 1;
                    if let Interruption::Dead(error) = rule.interrupt(row.crashes) {
                        row.state = JobState::Dead;
                        row.error = Some(error);
                        orphans.dead.push(row.spec.id);
                        return;
                    }
                    row.error = Some(INTERRUPTED.into());
                }
                orphans.interrupted.push(row.spec.id);
            });
        }
        orphans
    }

    /// See [`ClaimsOf`].
    pub fn claims_of(&self, owner: &Owner) -> Vec<Claim> {
        let held = self.nodes.get(&owner.node).filter(|lease| lease.owner == *owner);
        let held = held.and_then(|_| self.held.get(&owner.node)).into_iter().flatten();
        held.filter_map(|seq| self.rows.get(seq))
            .filter(|row| row.state == JobState::Claimed)
            .map(|row| Claim { job: row.spec.id, token: row.token })
            .collect()
    }

    /// See [`Lookup`].
    pub fn lookup(&self, jobs: &[JobId]) -> Vec<JobRow> {
        let rows = jobs.iter().filter_map(|id| self.rows.get(self.seqs.get(id)?));
        rows.map(|row| JobRow {
            id: row.spec.id,
            state: row.state,
            attempts: row.attempts,
            recorded: match row.state {
                JobState::Succeeded => row.result.clone().map(Recorded::Succeeded),
                JobState::Dead => Some(Recorded::Dead {
                    error: row.error.clone().unwrap_or_default(),
                    attempts: row.attempts,
                }),
                JobState::Cancelled => Some(Recorded::Cancelled),
                _ => None,
            },
            last_error: row.error.clone().filter(|_| !row.state.is_final()),
        })
        .collect()
    }

    /// See [`Cancel`].
    pub fn cancel(&mut self, jobs: &[JobId]) -> Vec<JobId> {
        let nobodys = |row: &Row| {
            matches!(row.state, JobState::Scheduled | JobState::Queued | JobState::Failed)
        };
        let cancelled = jobs.iter().filter(|id| {
            self.change_if(id, nobodys, |row| row.state = JobState::Cancelled).is_some()
        });
        cancelled.copied().collect()
    }

    /// See [`CountJobs`]. Counts the finished jobs that were forgotten too.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// See [`NextDue`].
    pub fn next_due(&self, now_ms: u64) -> Option<Duration> {
        self.later.first().map(|&(due_ms, _)| Duration::from_millis(due_ms.saturating_sub(now_ms)))
    }

    fn live_mut(&mut self, owner: &Owner) -> Option<&mut LeaseRow> {
        self.nodes.get_mut(&owner.node).filter(|lease| lease.owner == *owner && !lease.reaped)
    }

    fn check_live(&mut self, owner: &Owner) -> StoreResult<()> {
        match self.live_mut(owner) {
            Some(_) => Ok(()),
            None => Err(StoreError::LeaseLost(owner.clone())),
        }
    }

    /// Changes a row that `owner` holds unstarted by the claim.
    fn change_unstarted<T>(
        &mut self,
        owner: &Owner,
        claim: &Claim,
        change: impl FnOnce(&mut Row) -> T,
    ) -> Option<T> {
        let generation: Generation = self.nodes.get(&owner.node)?.owner.generation;
        let unstarted = |row: &Row| {
            generation == owner.generation
                && row.state == JobState::Claimed
                && row.token == claim.token
                && row.owner.as_ref() == Some(&owner.node)
        };
        self.change_if(&claim.job, unstarted, change)
    }

    /// Changes the row of `job` if it is there and as `expected`.
    fn change_if<T>(
        &mut self,
        job: &JobId,
        expected: impl FnOnce(&Row) -> bool,
        change: impl FnOnce(&mut Row) -> T,
    ) -> Option<T> {
        let seq = *self.seqs.get(job)?;
        if !expected(self.rows.get(&seq)?) {
            return None;
        }
        self.change(seq, change)
    }

    fn change<T>(&mut self, seq: u64, change: impl FnOnce(&mut Row) -> T) -> Option<T> {
        let mut row = self.take(seq)?;
        let answer = change(&mut row);
        self.put(seq, row);
        Some(answer)
    }

    /// Takes a row out of the table and of every order.
    fn take(&mut self, seq: u64) -> Option<Row> {
        let row = self.rows.remove(&seq)?;
        self.counts.set(row.state, self.counts.of(row.state) - 1);
        let place = (Reverse(row.spec.priority), row.due_ms, seq);
        match row.state {
            JobState::Queued => {
                self.due.remove(&place);
                remove_from(&mut self.due_of, &row.affinity, &place);
            }
            JobState::Scheduled | JobState::Failed => {
                self.later.remove(&(row.due_ms, seq));
            }
            JobState::Claimed | JobState::Running => {
                if let Some(owner) = &row.owner {
                    remove_from(&mut self.held, owner, &seq);
                }
            }
            _ => {}
        }
        Some(row)
    }

    /// Puts a row into the table and the orders of its state.
    fn put(&mut self, seq: u64, row: Row) {
        self.counts.set(row.state, self.counts.of(row.state) + 1);
        let place = (Reverse(row.spec.priority), row.due_ms, seq);
        match row.state {
            JobState::Queued => {
                self.due.insert(place);
                self.due_of.entry(row.affinity.clone()).or_default().insert(place);
            }
            JobState::Scheduled | JobState::Failed => {
                self.later.insert((row.due_ms, seq));
            }
            JobState::Claimed | JobState::Running => {
                if let Some(owner) = &row.owner {
                    self.held.entry(owner.clone()).or_default().insert(seq);
                }
            }
            _ => self.finished.push_back(seq),
        }
        self.rows.insert(seq, row);
        if self.finished.len() > REMEMBERED_MAX
            && let Some(oldest) = self.finished.pop_front()
            && let Some(forgotten) = self.rows.remove(&oldest)
        {
            self.seqs.remove(&forgotten.spec.id);
        }
    }
}

fn remove_from<T: Ord>(sets: &mut BTreeMap<NodeId, BTreeSet<T>>, node: &NodeId, item: &T) {
    if let Some(set) = sets.get_mut(node) {
        set.remove(item);
        if set.is_empty() {
            sets.remove(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use meshwork_protocol::id::{HandlerName, Tenant};

    use super::*;

    fn job(n: u64) -> NewJob {
        let node = NodeId::new("a").unwrap();
        let spec = JobSpec {
            id: JobId::from_parts(n, [0; 10]),
            handler: HandlerName::new("h").unwrap(),
            arguments: "null".into(),
            key: None,
            tenant: Tenant::default_tenant(),
            priority: 0,
            run_at_ms: 0,
            max_attempts: 1,
            pinned: false,
            origin: node.clone(),
            enqueued_ms: 0,
        };
        NewJob { spec: spec.into(), affinity: node, claim: false }
    }

    #[test]
    fn the_oldest_finished_jobs_are_forgotten_but_counted() {
        let mut table = JobTable::default();
        let owner = Owner { node: NodeId::new("a").unwrap(), generation: Generation(1) };
        let jobs = REMEMBERED_MAX as u64 + 2;
        for n in 0..jobs {
            table.insert(0, &Insert { owner: owner.clone(), jobs: vec![job(n)] }).unwrap();
            table.cancel(&[JobId::from_parts(n, [0; 10])]);
        }
        let ids = [0, 1, 2, jobs - 1].map(|n| JobId::from_parts(n, [0; 10]));
        let found: Vec<_> = table.lookup(&ids).iter().map(|row| row.id).collect();
        assert_eq!(found, ids[2..]);
        assert_eq!(table.counts().of(JobState::Cancelled), jobs);
        assert_eq!((table.rows.len(), table.seqs.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
    }
}
