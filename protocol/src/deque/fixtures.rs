//! Nodes, owners and jobs for tests.

use std::sync::Arc;

use super::Entry;
use crate::id::{FencingToken, Generation, HandlerName, JobId, NodeId, Owner, Tenant};
use crate::job::{ClaimedJob, JobSpec};
use crate::time::Instant;

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(crate) fn owner(name: &str) -> Owner {
    Owner { node: node(name), generation: Generation(1) }
}

pub(crate) fn id(n: u64) -> JobId {
    JobId::from_parts(n, [0; 10])
}

pub(crate) fn at_ms(ms: u64) -> Instant {
    Instant::from_micros(ms * 1_000)
}

pub(crate) fn spec(n: u64) -> JobSpec {
    JobSpec {
        id: id(n),
        handler: HandlerName::new("digest").unwrap(),
        arguments: Arc::from("{}"),
        key: None,
        tenant: Tenant::default_tenant(),
        priority: 0,
        run_at_ms: 0,
        max_attempts: 1,
        pinned: false,
        origin: node("a"),
        enqueued_ms: 0,
    }
}

pub(crate) fn job(n: u64) -> ClaimedJob {
    claimed(spec(n), 1)
}

pub(crate) fn claimed(spec: JobSpec, token: u64) -> ClaimedJob {
    ClaimedJob { spec: Arc::new(spec), token: FencingToken(token), attempt: 1 }
}

pub(crate) fn entry(n: u64, owned: bool, queued_ms: u64) -> Entry {
    Entry { job: job(n), owned, queued_at: at_ms(queued_ms), stolen: false }
}

/// The numbers that jobs were made with.
pub(crate) fn numbers<'a>(jobs: impl IntoIterator<Item = &'a JobId>) -> Vec<u64> {
    let number = |id: &JobId| {
        let mut bytes = [0; 8];
        bytes[2..].copy_from_slice(&id.as_bytes()[..6]);
        u64::from_be_bytes(bytes)
    };
    jobs.into_iter().map(number).collect()
}
