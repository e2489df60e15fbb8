//! A request to the database, by its message.

use actix::Message;
use actix::dev::OneshotSender;

use super::database::{Pending, Tx};
use crate::store::messages::{StoreError, StoreResult};

/// When a message's turn comes within a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Before all others: a lease must not be lost behind a flood of jobs.
    Lease,
    /// In the order of arrival.
    Write,
    /// After the batch has been committed, of which it sees the effects.
    Read,
}

/// A message that is one request to the database.
pub(super) trait Operation:
    Message<Result = StoreResult<Self::Answer>> + Send + 'static
{
    /// What it is answered.
    type Answer: Send + 'static;
    /// When its turn comes.
    const LANE: Lane;

    /// Its size, in the units of [`limits`](crate::store::limits).
    fn units(&self) -> usize {
        1
    }

    /// Does it. An error undoes it; it may be done again in another transaction.
    ///
    /// # Errors
    /// Of the database. What the request itself got wrong is its answer.
    fn execute(&self, tx: &Tx<'_>) -> rusqlite::Result<Reply<Self>>;
}

/// The whole answer to an operation.
pub(super) type Reply<O> = StoreResult<<O as Operation>::Answer>;

/// An operation that waits, with whoever waits for it.
pub(super) struct Waiting<O: Operation> {
    operation: O,
    answer: Option<Reply<O>>,
    caller: Option<OneshotSender<Reply<O>>>,
}

impl<O: Operation> Waiting<O> {
    pub(super) fn new(operation: O, caller: Option<OneshotSender<Reply<O>>>) -> Self {
        Self { operation, answer: None, caller }
    }
}

impl<O: Operation> Pending for Waiting<O> {
    fn execute(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        self.answer = Some(self.operation.execute(tx)?);
        Ok(())
    }

    fn fail(&mut self, error: StoreError) {
        self.answer = Some(Err(error));
    }

    fn reply(self: Box<Self>) {
        if let (Some(caller), Some(answer)) = (self.caller, self.answer) {
            // Who no longer listens has given up.
            let _ = caller.send(answer);
        }
    }
}
