//! Every bound of the stores, with its reason and how it relates to the others.

use std::time::Duration;

/// Crashes of its node that a running job may be charged before it is dead. One crash is often the
/// neighbour's fault and two are bad luck; a job that was running at three is the likely cause.
pub const CRASH_BUDGET: u32 = 3;

/// Most jobs that one claim takes, whatever is asked for: sixteen times a full default buffer.
pub const CLAIM_MAX: usize = 1_024;

/// Most scheduled and failed jobs that one claim moves to the queue, by the time they became due.
/// At least what the same claim may take, so that a claim never misses one that is due.
pub const PROMOTE_MAX: usize = CLAIM_MAX;

/// Size of one commit, in units: one for each row that a request may write, and one for each KiB of
/// its text. Large enough that the cost of a commit is spread over it, small enough that a lease
/// operation that waits for it waits some tens of milliseconds.
pub const BATCH_UNITS_MAX: usize = 4_096;

/// What may wait for a commit, in the same units; past it a request is refused as busy. Sixteen full
/// commits: about a second of work, and at most 64 MiB of text.
pub const WAITING_UNITS_MAX: usize = 16 * BATCH_UNITS_MAX;

/// Messages that may lie in the mailbox of a store before senders are made to wait.
pub const MAILBOX_MAX: usize = 4_096;

/// Finished jobs that a memory store remembers; the oldest are forgotten first.
pub const REMEMBERED_MAX: usize = 1 << 17;

/// Unfinished jobs that a memory store holds; past it inserts are refused as busy.
pub const UNFINISHED_MAX: usize = 1 << 20;

/// How long a SQLite store waits for its turn to write before the batch fails.
pub const BUSY_WAIT: Duration = Duration::from_secs(10);

/// The pause between two tries for the write lock, at first. Short: with the pauses of SQLite's own
/// busy time-out, one of several processes on a file may get no turn for seconds.
pub const BUSY_PAUSE: Duration = Duration::from_micros(200);

/// How long a process waits for its turn before the others let it go first: some ten commits.
pub const OVERDUE: Duration = Duration::from_millis(10);

/// The part of its busy wait in which a process lets the overdue go first; the rest is for SQLite's
/// lock, should one of them have been stopped.
pub const PATIENCE_PART: u32 = 10;

/// The pause of the one that the others let go first.
pub const OVERDUE_PAUSE: Duration = Duration::from_micros(50);

/// How long the pause stays as it was at first: several turns of a handful of processes.
pub const BUSY_FAIR: Duration = Duration::from_millis(50);

/// The pause of one that has waited long, as it does among many processes. Sixty-four of them then
/// try 32,000 times a second; with the first pause it would be 320,000 times, which two cores
/// cannot do.
pub const BUSY_PAUSE_MAX: Duration = Duration::from_millis(2);

const _: () = assert!(
    OVERDUE.as_micros() < BUSY_FAIR.as_micros()
        && OVERDUE_PAUSE.as_micros() < BUSY_PAUSE.as_micros(),
    "the overdue go first before pauses grow, and pause less than others"
);
const _: () = assert!(PROMOTE_MAX >= CLAIM_MAX, "a claim finds every job that is due");
const _: () = assert!(WAITING_UNITS_MAX >= BATCH_UNITS_MAX, "a full commit may wait");
