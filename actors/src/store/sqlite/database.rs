//! One connection, and batches of requests in its transactions.
//!
//! Invariant: a request's answer is settled by a transaction that was committed, or it is an error
//! and the database is as if the request had never been made.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use meshwork_protocol::id::{NodeId, Owner};
use rusqlite::{Connection, ErrorCode, OptionalExtension};

use super::open::{self, OpenError, SqliteOptions};
use super::turns::Turns;
use crate::store::messages::StoreError;
use crate::store::rules::{CrashRule, WallClock};

/// A request that waits for its turn, whatever its kind.
pub(super) trait Pending: Send {
    /// Does it, and keeps the answer.
    fn execute(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()>;
    /// Keeps an error as the answer.
    fn fail(&mut self, error: StoreError);
    /// Sends the answer that was kept.
    fn reply(self: Box<Self>);
}

/// The requests of one transaction.
pub(super) type Batch = Vec<Box<dyn Pending>>;

/// A connection to a database that was checked.
pub(super) struct Database {
    connection: Connection,
    turns: Turns,
    path: PathBuf,
    clock: WallClock,
    crash_rule: CrashRule,
    /// Seqs of nodes by name: rows of nodes are never removed. Emptied when a transaction is undone,
    /// since it may have made some of them.
    node_seqs: RefCell<HashMap<NodeId, i64>>,
}

/// A transaction, as a request sees it.
pub(super) struct Tx<'a> {
    pub(super) connection: &'a Connection,
    pub(super) now_ms: u64,
    pub(super) crash_rule: CrashRule,
    node_seqs: &'a RefCell<HashMap<NodeId, i64>>,
}

impl Database {
    pub(super) fn open(path: &Path, options: &SqliteOptions) -> Result<Self, OpenError> {
        let (connection, turns) = open::open(path, options)?;
        Ok(Self {
            connection,
            turns,
            path: path.to_owned(),
            clock: options.clock.clone(),
            crash_rule: options.crash_rule,
            node_seqs: RefCell::default(),
        })
    }

    /// Does what `batch` asks in one transaction that may write.
    pub(super) fn write(&self, batch: &mut Batch) {
        self.run_batch(|| self.turns.take(|| self.run("BEGIN IMMEDIATE")), batch);
    }

    /// Does what `batch` asks of one unchanging state of the database.
    pub(super) fn read(&self, batch: &mut Batch) {
        self.run_batch(|| self.run("BEGIN"), batch);
    }

    /// When a request fails on its own account, the batch is done again with each request in a
    /// savepoint, so that it alone fails. When the transaction fails, all do.
    fn run_batch(&self, begin: impl Fn() -> rusqlite::Result<()>, batch: &mut Batch) {
        let outcome = match self.transact(&begin, batch, Self::all_or_none) {
            Err(e) if batch.len() > 1 && !is_everyones(&e) => {
                self.transact(&begin, batch, Self::each_in_a_savepoint)
            }
            outcome => outcome,
        };
        if let Err(e) = outcome {
            tracing::warn!(path = %self.path.display(), requests = batch.len(), "batch failed: {e}");
            let error = self.store_error(&e);
            batch.iter_mut().for_each(|request| request.fail(error.clone()));
        }
    }

    fn transact(
        &self,
        begin: impl Fn() -> rusqlite::Result<()>,
        batch: &mut Batch,
        execute: impl FnOnce(&Self, &Tx<'_>, &mut Batch) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<()> {
        begin()?;
        let tx = Tx {
            connection: &self.connection,
            now_ms: self.clock.now_ms(),
            crash_rule: self.crash_rule,
            node_seqs: &self.node_seqs,
        };
        let outcome = execute(self, &tx, batch).and_then(|()| self.run("COMMIT"));
        if outcome.is_err() {
            self.node_seqs.borrow_mut().clear();
            // SQLite has undone the transaction itself after some errors.
            if !self.connection.is_autocommit() {
                self.run("ROLLBACK")?;
            }
        }
        outcome
    }

    fn all_or_none(&self, tx: &Tx<'_>, batch: &mut Batch) -> rusqlite::Result<()> {
        batch.iter_mut().try_for_each(|request| request.execute(tx))
    }

    fn each_in_a_savepoint(&self, tx: &Tx<'_>, batch: &mut Batch) -> rusqlite::Result<()> {
        for request in batch {
            self.run("SAVEPOINT request")?;
            if let Err(e) = request.execute(tx) {
                if is_everyones(&e) || self.connection.is_autocommit() {
                    return Err(e);
                }
                self.run("ROLLBACK TO request")?;
                self.node_seqs.borrow_mut().clear();
                request.fail(self.store_error(&e));
            }
            self.run("RELEASE request")?;
        }
        Ok(())
    }

    fn run(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute([])?;
        Ok(())
    }

    fn store_error(&self, e: &rusqlite::Error) -> StoreError {
        let path = self.path.display();
        match e.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                StoreError::Unusable(format!("{path} is damaged: {e}"))
            }
            Some(ErrorCode::DatabaseBusy) => {
                StoreError::Failed(format!("{path}: no turn to write among other processes: {e}"))
            }
            _ => StoreError::Failed(format!("{path}: {e}")),
        }
    }
}

/// Whether an error is of the transaction, not of the one request that met it.
fn is_everyones(e: &rusqlite::Error) -> bool {
    open::is_busy(e)
        || matches!(
            e.sqlite_error_code(),
            Some(
                ErrorCode::DiskFull
                    | ErrorCode::SystemIoFailure
                    | ErrorCode::OutOfMemory
                    | ErrorCode::ReadOnly
                    | ErrorCode::CannotOpen
                    | ErrorCode::DatabaseCorrupt
                    | ErrorCode::NotADatabase
                    | ErrorCode::SchemaChanged
                    | ErrorCode::OperationInterrupted
            )
        )
}

impl Tx<'_> {
    /// The seq of the node's row, if it has one.
    pub(super) fn find_node(&self, id: &NodeId) -> rusqlite::Result<Option<i64>> {
        if let Some(&seq) = self.node_seqs.borrow().get(id) {
            return Ok(Some(seq));
        }
        let found = self
            .connection
            .prepare_cached("SELECT seq FROM nodes WHERE id = ?1")?
            .query_row([id.as_str()], |row| row.get(0))
            .optional()?;
        if let Some(seq) = found {
            self.node_seqs.borrow_mut().insert(id.clone(), seq);
        }
        Ok(found)
    }

    /// The seq of the node's row, which is made if it has none.
    pub(super) fn node(&self, id: &NodeId) -> rusqlite::Result<i64> {
        if let Some(seq) = self.find_node(id)? {
            return Ok(seq);
        }
        let seq = self
            .connection
            .prepare_cached("INSERT INTO nodes (id) VALUES (?1)")?
            .insert([id.as_str()])?;
        self.node_seqs.borrow_mut().insert(id.clone(), seq);
        Ok(seq)
    }

    /// The seq of the owner's row, if it is of this boot; reaped or not.
    pub(super) fn boot(&self, owner: &Owner) -> rusqlite::Result<Option<i64>> {
        self.boot_where("SELECT seq FROM nodes WHERE id = ?1 AND generation = ?2", owner)
    }

    /// The seq of the owner's row, if its lease stands.
    pub(super) fn live(&self, owner: &Owner) -> rusqlite::Result<Option<i64>> {
        self.boot_where(
            "SELECT seq FROM nodes WHERE id = ?1 AND generation = ?2 AND reaped = 0",
            owner,
        )
    }

    fn boot_where(&self, sql: &str, owner: &Owner) -> rusqlite::Result<Option<i64>> {
        self.connection
            .prepare_cached(sql)?
            .query_row((owner.node.as_str(), number(owner.generation.0)), |row| row.get(0))
            .optional()
    }
}

/// A number as SQLite has it. One that is too great for it matches no row.
pub(super) fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meshwork_protocol::id::{Generation, HandlerName, JobId, Tenant};
    use meshwork_protocol::job::JobSpec;
    use tokio::sync::oneshot::{self, Receiver};

    use super::super::operation::Waiting;
    use super::*;
    use crate::store::messages::{Insert, Inserted, NewJob, StoreResult};

    type Answers = Vec<Receiver<StoreResult<Vec<Inserted>>>>;

    fn inserts(count: u64, argument_bytes: usize) -> (Batch, Answers) {
        let node = NodeId::new("a").unwrap();
        let inserts = (0..count).map(|n| {
            let spec = JobSpec {
                id: JobId::from_parts(n, [0; 10]),
                handler: HandlerName::new("h").unwrap(),
                arguments: "1".repeat(argument_bytes).into(),
                key: None,
                tenant: Tenant::default_tenant(),
                priority: 0,
                run_at_ms: 0,
                max_attempts: 1,
                pinned: false,
                origin: node.clone(),
                enqueued_ms: 0,
            };
            let job = NewJob { spec: Arc::new(spec), affinity: node.clone(), claim: false };
            let owner = Owner { node: node.clone(), generation: Generation(1) };
            let (caller, answer) = oneshot::channel();
            let insert = Waiting::new(Insert { owner, jobs: vec![job] }, Some(caller));
            (Box::new(insert) as Box<dyn Pending>, answer)
        });
        inserts.unzip()
    }

    fn answers(batch: Batch, answers: Answers) -> Vec<StoreResult<Vec<Inserted>>> {
        batch.into_iter().for_each(Pending::reply);
        answers.into_iter().map(|mut answer| answer.try_recv().unwrap()).collect()
    }

    #[test]
    fn a_full_disk_fails_the_whole_batch_and_leaves_nothing_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let database = Database::open(&path, &SqliteOptions::default()).unwrap();
        let pages = |count: u32| {
            let sql = format!("PRAGMA max_page_count = {count}");
            database.connection.query_row(&sql, [], |row| row.get::<_, u32>(0)).unwrap()
        };
        pages(64);
        let (mut batch, receivers) = inserts(3, 100_000);
        database.write(&mut batch);
        let full = StoreError::Failed(format!("{}: database or disk is full", path.display()));
        assert_eq!(answers(batch, receivers), [Err(full.clone()), Err(full.clone()), Err(full)]);

        pages(1 << 20);
        let (mut batch, receivers) = inserts(3, 100_000);
        database.write(&mut batch);
        let inserted = Ok(vec![Inserted::Unclaimed]);
        assert_eq!(answers(batch, receivers), vec![inserted; 3], "none of them is a duplicate");
    }
}
