//! What the tests of stores share: stores to test, a clock to turn, jobs and short ways to ask.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use actix::prelude::*;
use meshwork_actors::store::memory::MemoryStore;
use meshwork_actors::store::messages::*;
use meshwork_actors::store::sqlite::{SqliteOptions, SqliteStore};
use meshwork_actors::store::{CrashRule, WallClock};
use meshwork_protocol::id::{FencingToken, Generation, HandlerName, JobId, NodeId, Owner, Tenant};
use meshwork_protocol::job::{Claim, ClaimedJob, Disposition, JobSpec, JobState};

/// When every test begins, in milliseconds since the Unix epoch.
pub(crate) const START_MS: u64 = 1_700_000_000_000;

/// A clock that stands still until it is turned.
#[derive(Clone, Debug)]
pub(crate) struct TestClock(Arc<AtomicU64>);

impl TestClock {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicU64::new(START_MS)))
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn wall(&self) -> WallClock {
        let now = self.0.clone();
        WallClock::new(move || now.load(Ordering::Relaxed))
    }
}

/// A store under test.
pub(crate) struct Subject {
    pub(crate) store: StoreHandle,
    pub(crate) clock: TestClock,
    folder: Option<tempfile::TempDir>,
    arbiter: Option<Arbiter>,
}

impl Subject {
    pub(crate) fn memory() -> Self {
        Self::memory_with(CrashRule::default())
    }

    pub(crate) fn memory_with(crash_rule: CrashRule) -> Self {
        let clock = TestClock::new();
        let store = MemoryStore::new(clock.wall(), crash_rule).start();
        Self { store: StoreHandle::of(&store), clock, folder: None, arbiter: None }
    }

    pub(crate) fn sqlite() -> Self {
        Self::sqlite_with(CrashRule::default())
    }

    pub(crate) fn sqlite_with(crash_rule: CrashRule) -> Self {
        let clock = TestClock::new();
        let folder = tempfile::tempdir().unwrap();
        let options = SqliteOptions { clock: clock.wall(), crash_rule, ..SqliteOptions::default() };
        let (store, arbiter) = start_sqlite(&folder.path().join("jobs.db"), &options);
        Self { store, clock, folder: Some(folder), arbiter: Some(arbiter) }
    }

    /// The file of a store that has one.
    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.folder.as_ref().expect("a store with a file").path().join("jobs.db")
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(arbiter) = self.arbiter.take() {
            arbiter.stop();
            let _ = arbiter.join();
        }
    }
}

/// Starts a SQLite store on an arbiter of its own.
pub(crate) fn start_sqlite(path: &Path, options: &SqliteOptions) -> (StoreHandle, Arbiter) {
    let store = SqliteStore::open(path, options).unwrap();
    let arbiter = Arbiter::new();
    let store = SqliteStore::start_in_arbiter(&arbiter.handle(), move |_| store);
    (StoreHandle::of(&store), arbiter)
}

/// A way to ask a store in one word, by the message's type.
pub(crate) trait Ask<M: Message + Send + 'static>
where
    M::Result: Send,
{
    fn recipient(&self) -> &Recipient<M>;
}

macro_rules! ask {
    ($($message:ident: $field:ident),* $(,)?) => {
        $(impl Ask<$message> for StoreHandle {
            fn recipient(&self) -> &Recipient<$message> {
                &self.$field
            }
        })*
    };
}

ask! {
    Insert: insert, ClaimDue: claim, Start: start, Finish: finish, Transfer: transfer,
    Retake: retake, Release: release, Register: register, LeaseOf: lease_of, Renew: renew,
    Leases: leases, Reap: reap, Retire: retire, ClaimsOf: claims_of, Readopt: readopt,
    Lookup: lookup, Cancel: cancel, CountJobs: count, NextDue: next_due, Close: close,
}

/// Asks, and waits for the answer.
pub(crate) async fn ask<M>(store: &StoreHandle, message: M) -> M::Result
where
    M: Message + Send + 'static,
    M::Result: Send,
    StoreHandle: Ask<M>,
{
    store.recipient().send(message).await.expect("the store lives")
}

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(crate) fn owner(name: &str, generation: u64) -> Owner {
    Owner { node: node(name), generation: Generation(generation) }
}

pub(crate) fn id(n: u64) -> JobId {
    let mut random = [0; 10];
    random[2..].copy_from_slice(&n.to_be_bytes());
    JobId::from_parts(START_MS + n, random)
}

pub(crate) fn spec(n: u64) -> JobSpec {
    JobSpec {
        id: id(n),
        handler: HandlerName::new("digest").unwrap(),
        arguments: format!("{{\"n\":{n}}}").into(),
        key: None,
        tenant: Tenant::default_tenant(),
        priority: 0,
        run_at_ms: 0,
        max_attempts: 3,
        pinned: false,
        origin: node("a"),
        enqueued_ms: START_MS,
    }
}

/// A job of `affinity`, to be inserted unclaimed.
pub(crate) fn unclaimed(spec: JobSpec, affinity: &str) -> NewJob {
    NewJob { spec: spec.into(), affinity: node(affinity), claim: false }
}

/// A job to be inserted claimed, with the affinity of `owner`.
pub(crate) fn claimed(n: u64, owner: &Owner) -> NewJob {
    NewJob { spec: spec(n).into(), affinity: owner.node.clone(), claim: true }
}

pub(crate) fn claim(n: u64, token: u64) -> Claim {
    Claim { job: id(n), token: FencingToken(token) }
}

pub(crate) fn succeeded(n: u64, token: u64) -> Ended {
    Ended { claim: claim(n, token), disposition: Disposition::Succeeded(format!("{n}").into()) }
}

/// A job, the token of its claim, and the attempt that comes next.
pub(crate) fn brief(jobs: &[ClaimedJob]) -> Vec<(JobId, u64, u32)> {
    jobs.iter().map(|job| (job.spec.id, job.token.0, job.attempt)).collect()
}

/// Registers a boot of each node, and names their owners.
pub(crate) async fn register<const N: usize>(store: &StoreHandle, names: [&str; N]) -> [Owner; N] {
    for name in names {
        let at_least = Generation(1);
        ask(store, Register { node: node(name), at_least, gossip: None, over: None })
            .await
            .unwrap();
    }
    names.map(|name| owner(name, 1))
}

pub(crate) async fn insert(store: &StoreHandle, owner: &Owner, jobs: Vec<NewJob>) -> Vec<Inserted> {
    ask(store, Insert { owner: owner.clone(), jobs }).await.unwrap()
}

pub(crate) async fn claim_due(store: &StoreHandle, owner: &Owner, max: usize) -> Vec<ClaimedJob> {
    ask(store, ClaimDue { owner: owner.clone(), max, own_only: false }).await.unwrap()
}

pub(crate) async fn start(store: &StoreHandle, owner: &Owner, claims: Vec<Claim>) -> Vec<bool> {
    ask(store, Start { owner: owner.clone(), claims }).await.unwrap()
}

pub(crate) async fn finish(store: &StoreHandle, ended: Vec<Ended>) -> Vec<bool> {
    ask(store, Finish { ended }).await.unwrap()
}

pub(crate) async fn state(store: &StoreHandle, n: u64) -> JobState {
    ask(store, Lookup { jobs: vec![id(n)] }).await.unwrap()[0].state
}
