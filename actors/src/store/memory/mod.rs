//! A store without durability: for tests, and for those who need none.
//!
//! Owns a [`JobTable`]; receives every message of a store and answers at once; sends nothing. When it
//! dies, all jobs are gone. Several nodes of one process may share one: they hold clones of one
//! handle.

mod table;

use actix::prelude::*;

pub use self::table::JobTable;
use super::limits::MAILBOX_MAX;
use super::messages::*;
use super::rules::{CrashRule, WallClock};

/// The store that forgets.
#[derive(Debug, Default)]
pub struct MemoryStore {
    table: JobTable,
    clock: WallClock,
    closed: bool,
}

impl MemoryStore {
    /// An empty store that takes the time from `clock` and treats crashed jobs by `crash_rule`.
    pub fn new(clock: WallClock, crash_rule: CrashRule) -> Self {
        Self { table: JobTable::new(crash_rule), clock, closed: false }
    }
}

impl Actor for MemoryStore {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MAX);
    }
}

macro_rules! handlers {
    ($($message:ident => |$table:ident, $m:ident, $now:ident| $answer:expr;)*) => {
        $(impl Handler<$message> for MemoryStore {
            type Result = MessageResult<$message>;

            fn handle(&mut self, $m: $message, _: &mut Self::Context) -> Self::Result {
                if self.closed {
                    return MessageResult(Err(StoreError::Stopped));
                }
                let $table = &mut self.table;
                let $now = self.clock.now_ms();
                MessageResult($answer)
            }
        })*
    };
}

handlers! {
    Insert => |table, m, now| table.insert(now, &m);
    ClaimDue => |table, m, now| table.claim(now, &m);
    Start => |table, m, _now| table.start(&m);
    Finish => |table, m, now| Ok(table.finish(now, &m));
    Transfer => |table, m, _now| table.transfer(&m);
    Retake => |table, m, _now| table.retake(&m);
    Release => |table, m, _now| Ok(table.release(&m));
    Register => |table, m, _now| table.register(&m);
    LeaseOf => |table, m, _now| Ok(table.lease_of(&m.node));
    Renew => |table, m, _now| table.renew(&m);
    Leases => |table, _m, _now| Ok(table.leases());
    Reap => |table, m, _now| Ok(table.reap(&m));
    Retire => |table, m, _now| Ok(table.retire(&m.owner));
    ClaimsOf => |table, m, _now| Ok(table.claims_of(&m.owner));
    Readopt => |table, m, _now| table.readopt(&m);
    Lookup => |table, m, _now| Ok(table.lookup(&m.jobs));
    Cancel => |table, m, _now| Ok(table.cancel(&m.jobs));
    CountJobs => |table, _m, _now| Ok(table.counts());
    NextDue => |table, _m, now| Ok(table.next_due(now));
}

impl Handler<Close> for MemoryStore {
    type Result = ();

    fn handle(&mut self, _: Close, ctx: &mut Self::Context) {
        self.closed = true;
        ctx.stop();
    }
}
