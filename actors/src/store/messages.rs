//! What a store is asked, whichever database is behind it.
//!
//! Every write to a job names the claim, (job, token), under which it is made, and every write that
//! uses a node's right to claims names the owner, (node, generation), whose row must exist unreaped
//! in the same transaction. A stale writer changes nothing and is told so.
//!
//! All messages are idempotent or fenced: sending one again after a lost answer is safe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use meshwork_protocol::id::{FencingToken, Generation, JobId, NodeId, Owner};
use meshwork_protocol::job::{Claim, ClaimedJob, Disposition, JobSpec, JobState, Recorded};

/// Why a store did not do what it was asked. The database is as it was before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The owner's row is gone or reaped: its claims are no longer its own.
    #[error("the lease of {0} is lost: another node has reaped it")]
    LeaseLost(Owner),
    /// Another boot of this node was registered meanwhile.
    #[error("generation {1} of node {0} was registered by another process at the same time")]
    Taken(NodeId, Generation),
    /// The file or server is not one that this version can use.
    #[error("{0}")]
    Unusable(String),
    /// Too many requests wait. Try again.
    #[error("the store is busy: {0}")]
    Busy(String),
    /// The database failed.
    #[error("the store failed: {0}")]
    Failed(String),
    /// The store has stopped.
    #[error("the store has stopped")]
    Stopped,
}

impl StoreError {
    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Failed(_))
    }
}

/// Shorthand for a store's answers.
pub type StoreResult<T> = Result<T, StoreError>;

/// A job to insert.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// The job.
    pub spec: Arc<JobSpec>,
    /// The node that should run it, by key or by acceptance.
    pub affinity: NodeId,
    /// Insert it already claimed by the inserting owner (token 1, attempt 1). Ignored for a job that
    /// is not due.
    pub claim: bool,
}

/// Inserts jobs, all or none. A job whose id exists is left as it is.
///
/// [`StoreError::LeaseLost`], with nothing inserted, when any is to be claimed and the owner's lease
/// is gone: accepting a job needs no lease, claiming it does.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<Inserted>>")]
pub struct Insert {
    /// Who accepts them.
    pub owner: Owner,
    /// The jobs.
    pub jobs: Vec<NewJob>,
}

/// What an [`Insert`] did with one job, in the order of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is in the store, nobody's (queued or scheduled).
    Unclaimed,
    /// It is in the store, claimed by the inserting owner with this token, attempt 1.
    Claimed(FencingToken),
    /// Its id was there before; nothing was written.
    Duplicate,
}

/// Claims due jobs: those with `owner`'s affinity first, then any. Within each, by priority, then
/// by the time they became due. Scheduled and failed jobs whose time has come are queued by this.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<ClaimedJob>>")]
pub struct ClaimDue {
    /// For whom.
    pub owner: Owner,
    /// At most so many.
    pub max: usize,
    /// Only jobs of `owner`'s affinity.
    pub own_only: bool,
}

/// Claimed to running, for each claim that still holds.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<bool>>")]
pub struct Start {
    /// Who runs.
    pub owner: Owner,
    /// The claims; the answer says for each, in order, whether it may run.
    pub claims: Vec<Claim>,
}

/// The end of an attempt, under the claim it ran by.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The claim.
    pub claim: Claim,
    /// What becomes of the job.
    pub disposition: Disposition,
}

/// Records ends. Needs no live lease: the token alone fences it.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<bool>>")]
pub struct Finish {
    /// The ends; the answer says for each, in order, whether it was recorded.
    pub ended: Vec<Ended>,
}

/// Moves claims from a victim to a thief: token + 1 for each claim that `from` holds unstarted.
/// [`StoreError::LeaseLost`] when the thief's own lease is gone; a victim that was reaped holds
/// nothing any more.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<Transferred>>")]
pub struct Transfer {
    /// The victim.
    pub from: Owner,
    /// The thief.
    pub to: Owner,
    /// The claims as offered.
    pub claims: Vec<Claim>,
    /// Of these jobs the answer has the whole job.
    pub fetch: Vec<JobId>,
}

/// A claim that was moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// The job, with the token that the thief now holds.
    pub claim: Claim,
    /// The whole job, if it was asked for.
    pub job: Option<ClaimedJob>,
}

/// A victim takes back what it offered: token + 1 for each claim that it still holds unstarted.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<Claim>>")]
pub struct Retake {
    /// The victim.
    pub owner: Owner,
    /// The claims as offered; the answer has those it holds again, with their new tokens.
    pub claims: Vec<Claim>,
}

/// Gives unstarted claims back: claimed to queued, for anyone.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<usize>")]
pub struct Release {
    /// Who holds them.
    pub owner: Owner,
    /// The claims; the answer counts those that were given back.
    pub claims: Vec<Claim>,
    /// The node that should have them now; without it their affinity stays.
    pub to: Option<NodeId>,
}

/// Starts a boot: allocates `max(previous + 1, at_least)` and a fresh lease for it. An older
/// generation of the same node that was not reaped is reaped by this, and its claims requeued: the
/// caller has made sure that it does not live.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Registered>")]
pub struct Register {
    /// The node.
    pub node: NodeId,
    /// The lowest generation to allocate.
    pub at_least: Generation,
    /// Where it takes datagrams, for others that find only the store.
    pub gossip: Option<SocketAddr>,
    /// Only if the newest generation on record is still this one (0: none), or
    /// [`StoreError::Taken`]. Without it, whatever is on record.
    pub over: Option<Generation>,
}

/// A boot that was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The generation allocated.
    pub generation: Generation,
    /// Jobs of older generations that were requeued.
    pub requeued: Vec<JobId>,
    /// Jobs of older generations that ran once too often into a crash: they are dead.
    pub dead: Vec<JobId>,
}

/// What the store has on record for a node's newest boot, before anyone registers over it.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Option<LeaseRow>>")]
pub struct LeaseOf {
    /// The node.
    pub node: NodeId,
}

/// Proves that a boot lives: renewals + 1.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<()>")]
pub struct Renew {
    /// Whose; [`StoreError::LeaseLost`] when it was reaped.
    pub owner: Owner,
}

/// All leases that are not reaped.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<LeaseRow>>")]
pub struct Leases;

/// One boot's lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRow {
    /// Whose.
    pub owner: Owner,
    /// Grows with each renewal.
    pub renewals: u64,
    /// Whether it was reaped or retired.
    pub reaped: bool,
    /// Where the node took datagrams.
    pub gossip: Option<SocketAddr>,
}

/// Ends the lease of a boot that was seen not to renew: reaped if `renewals` is still the same, and
/// all its claims requeued, token + 1, in the same transaction.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Option<Reaped>>")]
pub struct Reap {
    /// Whose.
    pub owner: Owner,
    /// As observed; `None` in answer when it has moved.
    pub renewals: u64,
}

/// What a reaping requeued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reaped {
    /// Jobs that only waited in its deque.
    pub buffered: Vec<JobId>,
    /// Jobs that were running: their attempt is spent, and the crash is charged to them.
    pub interrupted: Vec<JobId>,
    /// Jobs that were running and have no crash left to be charged: they are dead, not requeued.
    pub dead: Vec<JobId>,
}

/// Ends one's own lease at a clean stop; what is still claimed or running is requeued, token + 1, and
/// no crash is charged.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<usize>")]
pub struct Retire {
    /// Whose; the answer counts the jobs requeued.
    pub owner: Owner,
}

/// What the store says `owner` holds and has not started: the claims that a lost answer may have
/// hidden from it.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<Claim>>")]
pub struct ClaimsOf {
    /// Whose.
    pub owner: Owner,
}

/// Takes up claims that the owner has no memory of: token + 1, and the whole jobs.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<ClaimedJob>>")]
pub struct Readopt {
    /// Whose.
    pub owner: Owner,
    /// As listed by [`ClaimsOf`]; those that moved since are left out of the answer.
    pub claims: Vec<Claim>,
}

/// What became of jobs.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<JobRow>>")]
pub struct Lookup {
    /// Which; unknown ids are left out of the answer.
    pub jobs: Vec<JobId>,
}

/// A job as the store has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRow {
    /// The job.
    pub id: JobId,
    /// Its state.
    pub state: JobState,
    /// Attempts begun.
    pub attempts: u32,
    /// What it came to, once the state is final.
    pub recorded: Option<Recorded>,
    /// The last error, of a job that is to be tried again.
    pub last_error: Option<String>,
}

/// Withdraws jobs that nobody has started: scheduled, queued and failed ones to cancelled.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Vec<JobId>>")]
pub struct Cancel {
    /// Which; the answer has those that were withdrawn.
    pub jobs: Vec<JobId>,
}

/// Counts the jobs by state.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Counts>")]
pub struct CountJobs;

/// Jobs by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    by_state: [u64; JobState::ALL.len()],
}

impl Counts {
    /// Jobs in `state`.
    pub fn of(&self, state: JobState) -> u64 {
        self.by_state[usize::from(state.number())]
    }

    /// Sets the count of `state`.
    pub fn set(&mut self, state: JobState, count: u64) {
        self.by_state[usize::from(state.number())] = count;
    }

    /// All jobs.
    pub fn total(&self) -> u64 {
        self.by_state.iter().sum()
    }
}

/// When the next job that is not due yet becomes so.
#[derive(Clone, Debug, Message)]
#[rtype(result = "StoreResult<Option<Duration>>")]
pub struct NextDue;

/// Closes the store after what was sent before. What is sent later is refused.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Close;

macro_rules! store_handle {
    ($($field:ident: $message:ident),* $(,)?) => {
        /// A store, by what it can be asked. Cheap to clone; valid on any arbiter.
        #[derive(Clone)]
        #[allow(missing_docs, reason = "each field is the recipient of the message it is named after")]
        pub struct StoreHandle {
            $(pub $field: Recipient<$message>,)*
        }

        impl StoreHandle {
            /// The handle of the store actor at `addr`.
            pub fn of<A>(addr: &Addr<A>) -> Self
            where
                A: Actor $(+ Handler<$message>)*,
                A::Context: Sized $(+ actix::dev::ToEnvelope<A, $message>)*,
            {
                Self { $($field: addr.clone().recipient(),)* }
            }
        }
    };
}

store_handle! {
    insert: Insert,
    claim: ClaimDue,
    start: Start,
    finish: Finish,
    transfer: Transfer,
    retake: Retake,
    release: Release,
    register: Register,
    lease_of: LeaseOf,
    renew: Renew,
    leases: Leases,
    reap: Reap,
    retire: Retire,
    claims_of: ClaimsOf,
    readopt: Readopt,
    lookup: Lookup,
    cancel: Cancel,
    count: CountJobs,
    next_due: NextDue,
    close: Close,
}
