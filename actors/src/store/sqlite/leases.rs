//! What changes leases, and takes from a boot that ended what it held.

use meshwork_protocol::id::JobId;
use meshwork_protocol::job::JobState;
use rusqlite::OptionalExtension;

use super::database::{Tx, number};
use super::jobs::unsigned;
use super::operation::{Lane, Operation, Reply};
use crate::store::messages::{Reap, Reaped, Register, Registered, Renew, Retire, StoreError};
use crate::store::rules::{INTERRUPTED, Interruption, next_generation};

pub(super) const HELD: &str = "
    SELECT s.seq, s.state, s.crashes, j.id
    FROM job_states s INDEXED BY held JOIN jobs j ON j.seq = s.seq
    WHERE s.state IN (2, 3) AND s.owner = ?1 ORDER BY s.seq";
const REQUEUE: &str = "
    UPDATE job_states SET
        state = ?2, owner = NULL, token = token + 1, crashes = ?3, error = coalesce(?4, error),
        finished_ms = ?5
    WHERE seq = ?1";

impl Operation for Register {
    type Answer = Registered;
    const LANE: Lane = Lane::Lease;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let seq = tx.node(&self.node)?;
        let previous = tx
            .connection
            .prepare_cached("SELECT generation FROM nodes WHERE seq = ?1")?
            .query_row([seq], |row| unsigned(row, 0))?;
        if self.over.is_some_and(|over| over.0 != previous) {
            return Ok(Err(StoreError::Taken(
                self.node.clone(),
                meshwork_protocol::id::Generation(previous),
            )));
        }
        let generation = match next_generation(previous, self.at_least) {
            Ok(generation) => generation,
            Err(e) => return Ok(Err(e)),
        };
        let orphans = orphan(tx, seq, true)?;
        tx.connection
            .prepare_cached(
                "UPDATE nodes SET generation = ?2, renewals = 0, reaped = 0, gossip = ?3
                 WHERE seq = ?1",
            )?
            .execute((seq, number(generation.0), self.gossip.map(|gossip| gossip.to_string())))?;
        let requeued = [orphans.buffered, orphans.interrupted].concat();
        Ok(Ok(Registered { generation, requeued, dead: orphans.dead }))
    }
}

impl Operation for Renew {
    type Answer = ();
    const LANE: Lane = Lane::Lease;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let renewed = tx
            .connection
            .prepare_cached(
                "UPDATE nodes SET renewals = renewals + 1
                 WHERE id = ?1 AND generation = ?2 AND reaped = 0",
            )?
            .execute((self.owner.node.as_str(), number(self.owner.generation.0)))?;
        Ok(if renewed == 1 { Ok(()) } else { Err(StoreError::LeaseLost(self.owner.clone())) })
    }
}

impl Operation for Reap {
    type Answer = Option<Reaped>;
    const LANE: Lane = Lane::Lease;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let reaped = tx
            .connection
            .prepare_cached(
                "UPDATE nodes SET reaped = 1
                 WHERE id = ?1 AND generation = ?2 AND reaped = 0 AND renewals = ?3
                 RETURNING seq",
            )?
            .query_row(
                (self.owner.node.as_str(), number(self.owner.generation.0), number(self.renewals)),
                |row| row.get(0),
            )
            .optional()?;
        let Some(seq) = reaped else { return Ok(Ok(None)) };
        let Orphans { buffered, interrupted, dead } = orphan(tx, seq, true)?;
        Ok(Ok(Some(Reaped { buffered, interrupted, dead })))
    }
}

impl Operation for Retire {
    type Answer = usize;
    // Not before the requests that the same node sent before it.
    const LANE: Lane = Lane::Write;

    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>> {
        let Some(seq) = tx.live(&self.owner)? else { return Ok(Ok(0)) };
        tx.connection
            .prepare_cached("UPDATE nodes SET reaped = 1 WHERE seq = ?1")?
            .execute([seq])?;
        let orphans = orphan(tx, seq, false)?;
        Ok(Ok(orphans.buffered.len() + orphans.interrupted.len()))
    }
}

/// What was made of the jobs of a boot that ended.
#[derive(Default)]
struct Orphans {
    buffered: Vec<JobId>,
    interrupted: Vec<JobId>,
    dead: Vec<JobId>,
}

/// Takes from the node everything that it holds.
fn orphan(tx: &Tx<'_>, node: i64, crashed: bool) -> rusqlite::Result<Orphans> {
    let held = tx
        .connection
        .prepare_cached(HELD)?
        .query_map([node], |row| {
            let was_running = row.get::<_, u8>(1)? == JobState::Running.number();
            let id = JobId::from_bytes(row.get(3)?);
            Ok((row.get::<_, i64>(0)?, was_running, row.get::<_, u32>(2)?, id))
        })?
        .collect::<Result<Vec<_>, _>>()?;
    let mut orphans = Orphans::default();
    let mut requeue = tx.connection.prepare_cached(REQUEUE)?;
    for (seq, was_running, mut crashes, id) in held {
        let mut state = JobState::Queued;
        let mut error = None;
        if !was_running {
            orphans.buffered.push(id);
        } else if !crashed {
            orphans.interrupted.push(id);
        } else {
            crashes += 1;
            match tx.crash_rule.interrupt(crashes) {
                Interruption::Requeued => {
                    error = Some(INTERRUPTED.to_owned());
                    orphans.interrupted.push(id);
                }
                Interruption::Dead(reason) => {
                    state = JobState::Dead;
                    error = Some(reason);
                    orphans.dead.push(id);
                }
            }
        }
        let finished_ms = state.is_final().then(|| number(tx.now_ms));
        requeue.execute((seq, state.number(), crashes, error, finished_ms))?;
    }
    Ok(orphans)
}
