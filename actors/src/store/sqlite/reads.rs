//! What changes nothing.

use std::time::Duration;

use meshwork_protocol::id::{FencingToken, Generation, JobId, NodeId, Owner};
use meshwork_protocol::job::{Claim, JobState, Recorded};
use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Row};

use super::database::Tx;
use super::jobs::{name, unsigned};
use super::operation::{Lane, Operation, Reply};
use crate::store::messages::{
    ClaimsOf, CountJobs, Counts, JobRow, LeaseOf, LeaseRow, Leases, Lookup, NextDue,
};

pub(super) const CLAIMS_OF: &str = "
    SELECT j.id, s.token
    FROM job_states s INDEXED BY held JOIN jobs j ON j.seq = s.seq
    WHERE s.state IN (2, 3) AND s.owner = ?1 AND s.state = 2 ORDER BY s.seq";
pub(super) const LOOKUP: &str = "
    SELECT j.id, s.state, s.attempts, s.error, s.result
    FROM jobs j JOIN job_states s ON s.seq = j.seq WHERE j.id = ?1";
pub(super) const NEXT_DUE: &str =
    "SELECT min(due_ms) FROM job_states INDEXED BY later WHERE state IN (0, 5)";

impl Operation for LeaseOf {
    type Answer = Option<LeaseRow>;
    const LANE: Lane = Lane::Read;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        tx.connection
            .prepare_cached(
                "SELECT id, generation, renewals, reaped, gossip FROM nodes
                 WHERE id = ?1 AND generation > 0",
            )?
            .query_row([self.node.as_str()], lease)
            .optional()
            .map(Ok)
    }
}

impl Operation for Leases {
    type Answer = Vec<LeaseRow>;
    const LANE: Lane = Lane::Read;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        tx.connection
            .prepare_cached(
                "SELECT id, generation, renewals, reaped, gossip FROM nodes
                 WHERE reaped = 0 ORDER BY id",
            )?
            .query_map([], lease)?
            .collect::<Result<_, _>>()
            .map(Ok)
    }
}

fn lease(row: &Row<'_>) -> rusqlite::Result<LeaseRow> {
    let gossip: Option<String> = row.get(4)?;
    let gossip = gossip.map(|text| text.parse()).transpose();
    Ok(LeaseRow {
        owner: Owner {
            node: name(row, 0, NodeId::new)?,
            generation: Generation(unsigned(row, 1)?),
        },
        renewals: unsigned(row, 2)?,
        reaped: row.get(3)?,
        gossip: gossip
            .map_err(|e| rusqlite::Error::FromSqlConversionFailure(4, Type::Text, Box::new(e)))?,
    })
}

impl Operation for ClaimsOf {
    type Answer = Vec<Claim>;
    const LANE: Lane = Lane::Read;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(owner) = tx.boot(&self.owner)? else { return Ok(Ok(Vec::new())) };
        tx.connection
            .prepare_cached(CLAIMS_OF)?
            .query_map([owner], |row| {
                let token = FencingToken(unsigned(row, 1)?);
                Ok(Claim { job: JobId::from_bytes(row.get(0)?), token })
            })?
            .collect::<Result<_, _>>()
            .map(Ok)
    }
}

impl Operation for Lookup {
    type Answer = Vec<JobRow>;
    const LANE: Lane = Lane::Read;

    fn units(&self) -> usize {
        self.jobs.len()
    }

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let mut lookup = tx.connection.prepare_cached(LOOKUP)?;
        let mut found = Vec::with_capacity(self.jobs.len());
        for id in &self.jobs {
            found.extend(lookup.query_row([id.as_bytes()], job).optional()?);
        }
        Ok(Ok(found))
    }
}

fn job(row: &Row<'_>) -> rusqlite::Result<JobRow> {
    let state = state(row, 1)?;
    let attempts = row.get(2)?;
    let error: Option<String> = row.get(3)?;
    let (recorded, last_error) = match state {
        JobState::Succeeded => (Some(Recorded::Succeeded(row.get(4)?)), None),
        JobState::Dead => {
            (Some(Recorded::Dead { error: error.unwrap_or_default(), attempts }), None)
        }
        JobState::Cancelled => (Some(Recorded::Cancelled), None),
        _ => (None, error),
    };
    Ok(JobRow { id: JobId::from_bytes(row.get(0)?), state, attempts, recorded, last_error })
}

fn state(row: &Row<'_>, at: usize) -> rusqlite::Result<JobState> {
    let n: u8 = row.get(at)?;
    JobState::from_number(n).ok_or(rusqlite::Error::IntegralValueOutOfRange(at, n.into()))
}

impl Operation for CountJobs {
    type Answer = Counts;
    const LANE: Lane = Lane::Read;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let mut counts = Counts::default();
        let mut statement = tx
            .connection
            .prepare_cached("SELECT state, count(*) FROM job_states GROUP BY state")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            counts.set(state(row, 0)?, unsigned(row, 1)?);
        }
        Ok(Ok(counts))
    }
}

impl Operation for NextDue {
    type Answer = Option<Duration>;
    const LANE: Lane = Lane::Read;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let due_ms: Option<i64> =
            tx.connection.prepare_cached(NEXT_DUE)?.query_row([], |row| row.get(0))?;
        let wait = due_ms.map(|due_ms| {
            Duration::from_millis(u64::try_from(due_ms).unwrap_or(0).saturating_sub(tx.now_ms))
        });
        Ok(Ok(wait))
    }
}
