//! The embedded store: one SQLite file, which several processes may share.
//!
//! Owns a connection; receives every message of a store; sends nothing. It blocks its thread in each
//! commit, so it must have an arbiter of its own. When it dies, whoever waits gets a mailbox error,
//! and the file is as of the last commit.
//!
//! What arrives while a commit runs waits in the mailbox, and is committed together in the next one,
//! without lingering for more. An answer is sent after the commit that it depends on, never before.
//! A file that another process writes to is taken in turns.

mod database;
mod jobs;
mod leases;
mod open;
mod operation;
#[cfg(test)]
mod plans;
mod reads;
mod schema;
mod turns;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use actix::dev::{MessageResponse, OneshotSender};
use actix::prelude::*;

use self::database::{Batch, Database, Pending};
pub use self::open::{Durability, OpenError, SqliteOptions};
use self::operation::{Lane, Operation, Waiting};
use super::limits::{BATCH_UNITS_MAX, MAILBOX_MAX, WAITING_UNITS_MAX};
use super::messages::{Close, StoreError};

/// To itself: commit what waits.
#[derive(Message)]
#[rtype(result = "()")]
struct Commit;

/// The store in a SQLite file.
pub struct SqliteStore {
    /// `None` once it is closed.
    database: Option<Database>,
    queue: Arc<Mutex<Queue>>,
}

impl SqliteStore {
    /// Opens the database at `path`, and makes it if it is not there or empty. Blocks; then move the
    /// store to an arbiter of its own and start it there.
    ///
    /// # Errors
    /// [`OpenError`], which says what to do about it; the file is as it was.
    pub fn open(path: impl AsRef<Path>, options: &SqliteOptions) -> Result<Self, OpenError> {
        let database = Database::open(path.as_ref(), options)?;
        Ok(Self { database: Some(database), queue: Arc::default() })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Commits one batch, if anything waits, and answers it.
    fn commit(&self) {
        let Some(database) = &self.database else { return };
        let mut batch = self.queue().next_batch();
        if !batch.writes.is_empty() {
            database.write(&mut batch.writes);
            batch.writes.into_iter().for_each(Pending::reply);
        }
        if !batch.reads.is_empty() {
            database.read(&mut batch.reads);
            batch.reads.into_iter().for_each(Pending::reply);
        }
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").finish_non_exhaustive()
    }
}

impl Actor for SqliteStore {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Handler<Commit> for SqliteStore {
    type Result = ();

    fn handle(&mut self, _: Commit, ctx: &mut Self::Context) {
        self.commit();
        let closed = {
            let mut queue = self.queue();
            queue.commit_is_due = !queue.is_empty();
            if queue.commit_is_due {
                ctx.notify(Commit);
                return;
            }
            std::mem::take(&mut queue.closing)
        };
        if !closed.is_empty() {
            // Whoever asked may open the file again, or remove it, as soon as there is an answer.
            self.database = None;
            ctx.stop();
            closed.into_iter().flatten().for_each(|caller| {
                let _ = caller.send(());
            });
        }
    }
}

impl<O: Operation> Handler<O> for SqliteStore {
    type Result = Parked<O>;

    fn handle(&mut self, operation: O, _: &mut Self::Context) -> Self::Result {
        // A mailbox is drained to its end before a commit that was notified runs: so lease operations
        // behind a crowd are seen in time, but an endless flood must not put the commit off.
        if self.queue().is_overdue() {
            self.commit();
        }
        Parked { operation, queue: self.queue.clone() }
    }
}

impl Handler<Close> for SqliteStore {
    type Result = Closing;

    fn handle(&mut self, _: Close, _: &mut Self::Context) -> Self::Result {
        Closing(self.queue.clone())
    }
}

/// A request that is answered once it has been committed.
pub struct Parked<O> {
    operation: O,
    queue: Arc<Mutex<Queue>>,
}

impl<O: Operation> MessageResponse<SqliteStore, O> for Parked<O> {
    fn handle(self, ctx: &mut Context<SqliteStore>, caller: Option<OneshotSender<O::Result>>) {
        let mut queue = lock(&self.queue);
        let refusal = queue.refuses(O::LANE);
        match refusal {
            None => {
                let units = self.operation.units().max(1);
                queue.push(O::LANE, units, Box::new(Waiting::new(self.operation, caller)));
                queue.make_commit_due(ctx);
            }
            Some(error) => {
                drop(queue);
                if let Some(caller) = caller {
                    let _ = caller.send(Err(error));
                }
            }
        }
    }
}

/// The answer to [`Close`], once the last commit is done.
pub struct Closing(Arc<Mutex<Queue>>);

impl MessageResponse<SqliteStore, Close> for Closing {
    fn handle(self, ctx: &mut Context<SqliteStore>, caller: Option<OneshotSender<()>>) {
        let mut queue = lock(&self.0);
        queue.closed = true;
        queue.closing.push(caller);
        queue.make_commit_due(ctx);
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What waits for a commit.
///
/// Shared by the actor and the responses that its handlers return, since only a response is handed
/// its caller. Both live on the actor's thread: the lock is never waited for.
#[derive(Default)]
pub struct Queue {
    leases: VecDeque<Request>,
    others: VecDeque<Request>,
    units: usize,
    units_since_commit: usize,
    commit_is_due: bool,
    closed: bool,
    closing: Vec<Option<OneshotSender<()>>>,
}

struct Request {
    lane: Lane,
    units: usize,
    pending: Box<dyn Pending>,
}

/// What is done together.
#[derive(Default)]
struct NextBatch {
    writes: Batch,
    reads: Batch,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.others.is_empty()
    }

    fn is_overdue(&self) -> bool {
        self.units_since_commit >= WAITING_UNITS_MAX
    }

    /// Why a request cannot wait now. Lease operations are never refused for want of room: a node has
    /// one of them under way at a time.
    fn refuses(&mut self, lane: Lane) -> Option<StoreError> {
        if self.closed {
            return Some(StoreError::Stopped);
        }
        if self.units < WAITING_UNITS_MAX || lane == Lane::Lease {
            return None;
        }
        self.units_since_commit += 1;
        Some(StoreError::Busy(format!("{} requests wait", self.others.len())))
    }

    fn push(&mut self, lane: Lane, units: usize, pending: Box<dyn Pending>) {
        self.units += units;
        self.units_since_commit += units;
        let queue = if lane == Lane::Lease { &mut self.leases } else { &mut self.others };
        queue.push_back(Request { lane, units, pending });
    }

    fn make_commit_due(&mut self, ctx: &mut Context<SqliteStore>) {
        if !self.commit_is_due {
            self.commit_is_due = true;
            ctx.notify(Commit);
        }
    }

    /// Takes the next batch: lease operations first, then the others in order, up to the cap.
    fn next_batch(&mut self) -> NextBatch {
        self.units_since_commit = 0;
        let mut batch = NextBatch::default();
        let mut units = 0;
        while units < BATCH_UNITS_MAX
            && let Some(request) = self.leases.pop_front().or_else(|| self.others.pop_front())
        {
            units += request.units;
            match request.lane {
                Lane::Lease | Lane::Write => batch.writes.push(request.pending),
                Lane::Read => batch.reads.push(request.pending),
            }
        }
        self.units -= units;
        batch
    }
}
