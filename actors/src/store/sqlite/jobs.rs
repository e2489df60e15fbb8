//! What changes jobs.
//!
//! Every change of a job that exists is one `UPDATE` whose `WHERE` names the state and the token that
//! the caller believes in, and the owner where it has one: a stale caller hits no row.

use meshwork_protocol::id::{FencingToken, HandlerName, JobId, NodeId, Owner, Tenant};
use meshwork_protocol::job::{Claim, ClaimedJob, Disposition, JobSpec, JobState};
use meshwork_protocol::time::micros;
use rusqlite::types::Type;
use rusqlite::{Row, params};

use super::database::{Tx, number};
use super::operation::{Lane, Operation, Reply};
use crate::store::limits::{CLAIM_MAX, PROMOTE_MAX};
use crate::store::messages::{
    Cancel, ClaimDue, Finish, Insert, Inserted, NewJob, Readopt, Release, Retake, Start,
    StoreError, Transfer, Transferred,
};
use crate::store::rules::{NUMBER_MAX, first_state};

/// A row, found by the job's id.
macro_rules! of_job {
    () => {
        " WHERE seq = (SELECT seq FROM jobs WHERE id = ?1)"
    };
}

/// A row that an owner holds unstarted by a claim.
macro_rules! unstarted {
    () => {
        concat!(of_job!(), " AND state = 2 AND token = ?2 AND owner = ?3")
    };
}

const INSERT_JOB: &str = "
    INSERT INTO jobs (
        id, handler, arguments, key, tenant, priority, run_at_ms, max_attempts, pinned, origin,
        enqueued_ms
    ) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
    ON CONFLICT (id) DO NOTHING";
const INSERT_STATE: &str = "
    INSERT INTO job_states (seq, state, affinity, priority, due_ms, owner, token)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
/// A job as a claim has it, for [`claimed_job`].
macro_rules! claimed_job {
    ($from:literal) => {
        concat!(
            "SELECT s.token, s.attempts, j.id, j.handler, j.arguments, j.key, j.tenant, j.priority,
                j.run_at_ms, j.max_attempts, j.pinned, j.origin, j.enqueued_ms, s.seq ",
            $from
        )
    };
}

// A claim reads and then changes each row by its key, in one transaction that nobody else writes
// beside. `UPDATE .. WHERE seq IN (SELECT ..) RETURNING` fills two ephemeral tables: it was measured
// at 2.7 times the cost for a claim of one job, and is no cheaper at 256.
const ANY_LATER: &str = "
    SELECT EXISTS (
        SELECT 1 FROM job_states INDEXED BY later WHERE state IN (0, 5) AND due_ms <= ?1
    )";
pub(super) const PROMOTE: &str = "
    UPDATE job_states SET state = 1 WHERE seq IN (
        SELECT seq FROM job_states INDEXED BY later WHERE state IN (0, 5) AND due_ms <= ?1
        ORDER BY due_ms, seq LIMIT ?2
    )";
pub(super) const DUE_OF: &str = claimed_job!(
    "FROM job_states s INDEXED BY due_of CROSS JOIN jobs j ON j.seq = s.seq
    WHERE s.state = 1 AND s.affinity = ?1 ORDER BY s.priority DESC, s.due_ms, s.seq LIMIT ?2"
);
pub(super) const DUE: &str = claimed_job!(
    "FROM job_states s INDEXED BY due CROSS JOIN jobs j ON j.seq = s.seq
    WHERE s.state = 1 AND ?1 IS NOT NULL
    ORDER BY s.priority DESC, s.due_ms, s.seq LIMIT ?2"
);
pub(super) const BY_ID: &str =
    claimed_job!("FROM jobs j CROSS JOIN job_states s ON s.seq = j.seq WHERE j.id = ?1");
pub(super) const CLAIM: &str =
    "UPDATE job_states SET state = 2, owner = ?2, token = token + 1 WHERE seq = ?1 AND state = 1";
pub(super) const START: &str =
    concat!("UPDATE job_states SET state = 3, attempts = attempts + 1", unstarted!());
pub(super) const HAND_ON: &str =
    concat!("UPDATE job_states SET owner = ?4, token = token + 1", unstarted!());
pub(super) const RELEASE: &str = concat!(
    "UPDATE job_states SET state = 1, owner = NULL, token = token + 1,
        affinity = coalesce(?4, affinity)",
    unstarted!()
);
pub(super) const SUCCEED: &str = concat!(
    "UPDATE job_states SET state = 4, error = NULL, result = ?3, finished_ms = ?4",
    of_job!(),
    " AND state = 3 AND token = ?2"
);
const RETRY: &str = concat!(
    "UPDATE job_states SET state = 5, owner = NULL, error = ?3, due_ms = ?4",
    of_job!(),
    " AND state = 3 AND token = ?2"
);
const BURY: &str = concat!(
    "UPDATE job_states SET state = 6, error = ?3, finished_ms = ?4",
    of_job!(),
    " AND state = 3 AND token = ?2"
);
const CANCEL: &str = concat!(
    "UPDATE job_states SET state = 7, finished_ms = ?2",
    of_job!(),
    " AND state IN (0, 1, 5)"
);
impl Operation for Insert {
    type Answer = Vec<Inserted>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.jobs.iter().map(|job| 1 + job.spec.arguments.len() / 1_024).sum()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let owner = if self.jobs.iter().any(|job| job.claim) {
            match tx.live(&self.owner)? {
                Some(owner) => Some(owner),
                None => return Ok(lost(&self.owner)),
            }
        } else {
            None
        };
        self.jobs.iter().map(|job| insert(tx, owner, job)).collect::<Result<_, _>>().map(Ok)
    }
}

fn insert(tx: &Tx<'_>, owner: Option<i64>, job: &NewJob) -> rusqlite::Result<Inserted> {
    let spec = &*job.spec;
    let inserted = tx.connection.prepare_cached(INSERT_JOB)?.execute(params![
        spec.id.as_bytes(),
        spec.handler.as_str(),
        spec.arguments,
        spec.key,
        spec.tenant.as_str(),
        spec.priority,
        number(spec.run_at_ms.min(NUMBER_MAX)),
        spec.max_attempts,
        spec.pinned,
        spec.origin.as_str(),
        number(spec.enqueued_ms.min(NUMBER_MAX)),
    ])?;
    if inserted == 0 {
        return Ok(Inserted::Duplicate);
    }
    let seq = tx.connection.last_insert_rowid();
    let (first, due_ms) = first_state(spec, tx.now_ms);
    let owner = owner.filter(|_| job.claim && first == JobState::Queued);
    let state = if owner.is_some() { JobState::Claimed } else { first };
    let token = u64::from(owner.is_some());
    tx.connection.prepare_cached(INSERT_STATE)?.execute(params![
        seq,
        state.number(),
        tx.node(&job.affinity)?,
        spec.priority,
        number(due_ms),
        owner,
        number(token),
    ])?;
    Ok(match owner {
        Some(_) => Inserted::Claimed(FencingToken(token)),
        None => Inserted::Unclaimed,
    })
}

impl Operation for ClaimDue {
    type Answer = Vec<ClaimedJob>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        1 + self.max.min(CLAIM_MAX)
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.live(&self.owner)? else { return Ok(lost(&self.owner)) };
        promote(tx)?;
        let max = self.max.min(CLAIM_MAX);
        let mut claimed = claim(tx, DUE_OF, owner, max)?;
        if !self.own_only && claimed.len() < max {
            claimed.extend(claim(tx, DUE, owner, max - claimed.len())?);
        }
        Ok(Ok(claimed))
    }
}

/// Queues the scheduled and failed jobs whose time has come.
fn promote(tx: &Tx<'_>) -> rusqlite::Result<()> {
    let now_ms = number(tx.now_ms);
    let any = tx.connection.prepare_cached(ANY_LATER)?.query_row([now_ms], |row| row.get(0))?;
    if any {
        tx.connection.prepare_cached(PROMOTE)?.execute((now_ms, PROMOTE_MAX as i64))?;
    }
    Ok(())
}

fn claim(tx: &Tx<'_>, due: &str, owner: i64, max: usize) -> rusqlite::Result<Vec<ClaimedJob>> {
    let found = tx
        .connection
        .prepare_cached(due)?
        .query_map((owner, max as i64), |row| Ok((row.get::<_, i64>(13)?, claimed_job(row)?)))?
        .collect::<Result<Vec<_>, _>>()?;
    let mut claim = tx.connection.prepare_cached(CLAIM)?;
    let mut claimed = Vec::with_capacity(found.len());
    for (seq, mut job) in found {
        if claim.execute((seq, owner))? == 1 {
            job.token = job.token.next();
            claimed.push(job);
        }
    }
    Ok(claimed)
}

impl Operation for Start {
    type Answer = Vec<bool>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.claims.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.live(&self.owner)? else { return Ok(lost(&self.owner)) };
        let mut start = tx.connection.prepare_cached(START)?;
        let started = self.claims.iter().map(|claim| {
            let rows = start.execute((claim.job.as_bytes(), number(claim.token.0), owner))?;
            Ok(rows == 1)
        });
        started.collect::<Result<_, _>>().map(Ok)
    }
}

impl Operation for Finish {
    type Answer = Vec<bool>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        let units = self.ended.iter().map(|ended| match &ended.disposition {
            Disposition::Succeeded(result) => 1 + result.len() / 1_024,
            Disposition::RetryAfter { error, .. } | Disposition::Dead(error) => {
                1 + error.len() / 1_024
            }
        });
        units.sum()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let finished = self.ended.iter().map(|ended| {
            let (sql, text, time_ms) = match &ended.disposition {
                Disposition::Succeeded(result) => (SUCCEED, &**result, tx.now_ms),
                Disposition::Dead(error) => (BURY, error.as_str(), tx.now_ms),
                Disposition::RetryAfter { delay, error } => {
                    let delay_ms = micros(*delay).div_ceil(1_000);
                    let due_ms = tx.now_ms.saturating_add(delay_ms).min(NUMBER_MAX);
                    (RETRY, error.as_str(), due_ms)
                }
            };
            let Claim { job, token } = &ended.claim;
            let mut finish = tx.connection.prepare_cached(sql)?;
            Ok(finish.execute((job.as_bytes(), number(token.0), text, number(time_ms)))? == 1)
        });
        finished.collect::<Result<_, _>>().map(Ok)
    }
}

impl Operation for Transfer {
    type Answer = Vec<Transferred>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.claims.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(to) = tx.live(&self.to)? else { return Ok(lost(&self.to)) };
        let Some(from) = tx.boot(&self.from)? else { return Ok(Ok(Vec::new())) };
        let mut transferred = Vec::with_capacity(self.claims.len());
        for &Claim { job, token } in &self.claims {
            if let Some(claim) = hand_on(tx, Claim { job, token }, from, to)? {
                let job = if self.fetch.contains(&job) { Some(whole(tx, job)?) } else { None };
                transferred.push(Transferred { claim, job });
            }
        }
        Ok(Ok(transferred))
    }
}

impl Operation for Retake {
    type Answer = Vec<Claim>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.claims.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.live(&self.owner)? else { return Ok(lost(&self.owner)) };
        let mut retaken = Vec::with_capacity(self.claims.len());
        for &claim in &self.claims {
            retaken.extend(hand_on(tx, claim, owner, owner)?);
        }
        Ok(Ok(retaken))
    }
}

impl Operation for Readopt {
    type Answer = Vec<ClaimedJob>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.claims.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.live(&self.owner)? else { return Ok(lost(&self.owner)) };
        let mut adopted = Vec::with_capacity(self.claims.len());
        for &claim in &self.claims {
            if let Some(claim) = hand_on(tx, claim, owner, owner)? {
                adopted.push(whole(tx, claim.job)?);
            }
        }
        Ok(Ok(adopted))
    }
}

/// Moves a claim that `from` holds unstarted to `to`, who may be the same, under a new token.
fn hand_on(tx: &Tx<'_>, claim: Claim, from: i64, to: i64) -> rusqlite::Result<Option<Claim>> {
    let moved = tx.connection.prepare_cached(HAND_ON)?.execute((
        claim.job.as_bytes(),
        number(claim.token.0),
        from,
        to,
    ))?;
    Ok((moved == 1).then(|| Claim { job: claim.job, token: claim.token.next() }))
}

/// The whole of a job that was just handed on.
fn whole(tx: &Tx<'_>, job: JobId) -> rusqlite::Result<ClaimedJob> {
    tx.connection.prepare_cached(BY_ID)?.query_row([job.as_bytes()], claimed_job)
}

impl Operation for Release {
    type Answer = usize;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.claims.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.boot(&self.owner)? else { return Ok(Ok(0)) };
        let mut release = tx.connection.prepare_cached(RELEASE)?;
        let to = self.to.as_ref().map(|node| tx.node(node)).transpose()?;
        let mut released = 0;
        for claim in &self.claims {
            released +=
                release.execute((claim.job.as_bytes(), number(claim.token.0), owner, to))?;
        }
        Ok(Ok(released))
    }
}

impl Operation for Cancel {
    type Answer = Vec<JobId>;
    const LANE: Lane = Lane::Write;

    fn units(&self) -> usize {
        self.jobs.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let mut cancel = tx.connection.prepare_cached(CANCEL)?;
        let mut cancelled = Vec::new();
        for job in &self.jobs {
            if cancel.execute((job.as_bytes(), number(tx.now_ms)))? == 1 {
                cancelled.push(*job);
            }
        }
        Ok(Ok(cancelled))
    }
}

fn lost<T>(owner: &Owner) -> Result<T, StoreError> {
    Err(StoreError::LeaseLost(owner.clone()))
}

fn claimed_job(row: &Row<'_>) -> rusqlite::Result<ClaimedJob> {
    let spec = JobSpec {
        id: JobId::from_bytes(row.get(2)?),
        handler: name(row, 3, HandlerName::new)?,
        arguments: row.get(4)?,
        key: row.get(5)?,
        tenant: name(row, 6, Tenant::new)?,
        priority: row.get(7)?,
        run_at_ms: unsigned(row, 8)?,
        max_attempts: row.get(9)?,
        pinned: row.get(10)?,
        origin: name(row, 11, NodeId::new)?,
        enqueued_ms: unsigned(row, 12)?,
    };
    let attempts: u32 = row.get(1)?;
    Ok(ClaimedJob {
        spec: spec.into(),
        token: FencingToken(unsigned(row, 0)?),
        attempt: attempts.saturating_add(1),
    })
}

/// A name in column `at`, as `parse` checks it.
pub(super) fn name<'r, T, E>(
    row: &'r Row<'_>,
    at: usize,
    parse: impl FnOnce(&'r str) -> Result<T, E>,
) -> rusqlite::Result<T>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let text = row.get_ref(at)?.as_str()?;
    parse(text).map_err(|e| rusqlite::Error::FromSqlConversionFailure(at, Type::Text, Box::new(e)))
}

/// A number in column `at` that is never negative.
pub(super) fn unsigned(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    let n: i64 = row.get(at)?;
    u64::try_from(n).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(at, n))
}
