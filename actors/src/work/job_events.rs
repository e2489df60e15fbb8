//! What happens to jobs on a node, for those who follow.

use std::time::Duration;

use actix::prelude::*;
use meshwork_protocol::id::{JobId, NodeId, Owner};
use meshwork_protocol::job::Recorded;

/// Something happened to jobs here.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
#[non_exhaustive]
pub enum JobEvent {
    /// An attempt begins: its start is committed.
    Started {
        /// The job.
        job: JobId,
        /// Which attempt.
        attempt: u32,
        /// Whether it came from another node's deque.
        stolen: bool,
        /// How long it was in this node's deque.
        waited: Duration,
    },
    /// An attempt has ended, and its end is committed.
    Ended {
        /// The job.
        job: JobId,
        /// Which attempt.
        attempt: u32,
        /// Whether it came from another node's deque.
        stolen: bool,
        /// How long the handler ran.
        ran: Duration,
        /// Where the job was accepted.
        origin: NodeId,
        /// What it came to; `None` when it is to be tried again.
        recorded: Option<Recorded>,
        /// What failed, if anything did.
        error: Option<String>,
    },
    /// Jobs came from another node's deque.
    StolenIn {
        /// Whose.
        from: NodeId,
        /// How many.
        jobs: usize,
    },
    /// A dead node's jobs are to be claimed again.
    Requeued {
        /// Whose.
        from: Owner,
        /// Those that waited in its deque.
        buffered: Vec<JobId>,
        /// Those that it was running.
        interrupted: Vec<JobId>,
        /// Those that it was running, and that have crashed once too often: they are dead.
        dead: Vec<JobId>,
    },
}
