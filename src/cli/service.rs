//! Answers the requests of [`protocol`](crate::cli::protocol) for a running node, whichever way they
//! come.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt;
use meshwork::actors::clock::Clock;
use meshwork::actors::work::enqueue::new_job_id;
use meshwork::{
    EnqueueError, Followed, JobEvent, JobState, MembershipEvent, Mesh, Request as MeshRequest,
    StoreError,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use crate::cli::protocol::{Asked, Change, JobNews, JobRequest, Request, Said, Status};

/// Job events that wait for a watcher; those beyond are counted.
const EVENTS_MAX: usize = 1 << 16;
/// Job events in one line.
const NEWS_MAX: usize = 128;
/// How long events are collected before a watcher is told. Lines cost the watcher more than events.
const NEWS_EVERY: Duration = Duration::from_millis(10);
/// Time for the store to count its jobs.
const COUNT_LIMIT: Duration = Duration::from_secs(2);
/// Most jobs in one request.
const JOBS_MAX: usize = 10_000;

/// What one who asks is told. A bounded channel: a watcher that does not read waits there.
pub(crate) type Outlet = mpsc::Sender<Said>;

/// What a demo node does when it is told to start.
pub(crate) type Start = Rc<dyn Fn(Vec<crate::cli::protocol::Peer>, Vec<String>)>;

/// A node, to be asked.
#[derive(Clone)]
pub(crate) struct Service {
    mesh: Mesh,
    start: Option<Start>,
}

impl Service {
    /// A node that has started.
    pub(crate) fn new(mesh: Mesh) -> Self {
        Self { mesh, start: None }
    }

    /// A node that joins its mesh when it is told to.
    pub(crate) fn with_start(mesh: Mesh, start: Start) -> Self {
        Self { mesh, start: Some(start) }
    }

    /// Reads a request and answers it.
    pub(crate) async fn answer_line(&self, line: &[u8], outlet: &Outlet) {
        match serde_json::from_slice(line) {
            Ok(asked) => self.answer(asked, outlet).await,
            Err(e) => {
                let said = Said::Error { re: 0, message: e.to_string(), retryable: false };
                say(outlet, said).await;
            }
        }
    }

    /// Answers a request. Watching goes on until the outlet closes.
    pub(crate) async fn answer(&self, Asked { id: re, request }: Asked, outlet: &Outlet) {
        let said = match request {
            Request::Enqueue { jobs } => match self.enqueue(jobs).await {
                Ok((accepted, duplicates)) => Said::Enqueued { re, accepted, duplicates },
                Err((message, retryable)) => Said::Error { re, message, retryable },
            },
            Request::Status => Said::Status { re, status: Box::new(self.status().await) },
            Request::Watch => {
                // The answer comes first, then what there is to see.
                say(outlet, Said::Watching { re }).await;
                self.watch(outlet);
                return;
            }
            Request::Start { peers, seeds } => match &self.start {
                Some(start) => {
                    start(peers, seeds);
                    Said::Started { re }
                }
                None => {
                    let message = "this node has started already".into();
                    Said::Error { re, message, retryable: false }
                }
            },
        };
        say(outlet, said).await;
    }

    async fn enqueue(&self, jobs: Vec<JobRequest>) -> Result<(u32, u32), (String, bool)> {
        if jobs.len() > JOBS_MAX {
            let message = format!("{} jobs at once, at most {JOBS_MAX} are allowed", jobs.len());
            return Err((message, false));
        }
        let requests = jobs.into_iter().map(mesh_request).collect::<Result<Vec<_>, _>>();
        let requests = requests.map_err(|e| refusal(&e))?;
        let accepted = self.mesh.enqueue_batch(requests).await.map_err(|e| refusal(&e))?;
        let duplicates = accepted.iter().filter(|a| a.duplicate).count();
        Ok(((accepted.len() - duplicates) as u32, duplicates as u32))
    }

    async fn status(&self) -> Status {
        let mesh = &self.mesh;
        let counts = timeout(COUNT_LIMIT, mesh.counts()).await;
        let store = counts.ok().and_then(Result::ok).map(|counts| {
            let row = |state: JobState| (state.name().into(), counts.of(state));
            JobState::ALL.into_iter().map(row).collect::<BTreeMap<_, _>>()
        });
        let counters = mesh.metrics().rows().into_iter().map(|(name, n)| (name.into(), n));
        Status {
            id: mesh.id().clone(),
            generation: mesh.generation(),
            gossip: mesh.gossip_addr(),
            steal: mesh.steal_addr(),
            members: mesh.members().members.to_vec(),
            load: mesh.load(),
            counters: counters.collect(),
            store,
        }
    }

    fn watch(&self, outlet: &Outlet) {
        actix::spawn(tell_membership(self.mesh.clone(), outlet.clone()));
        actix::spawn(tell_jobs(self.mesh.clone(), outlet.clone()));
        let (mesh, outlet) = (self.mesh.clone(), outlet.clone());
        actix::spawn(async move {
            let reason = mesh.stopped().await.to_string();
            say(&outlet, Said::Stopped { reason }).await;
        });
    }
}

/// What went wrong, and whether the same request may succeed later: also after a lost lease, for the
/// node takes a new one.
fn refusal(error: &EnqueueError) -> (String, bool) {
    let lease_lost = matches!(error, EnqueueError::Store(StoreError::LeaseLost(_)));
    (error.to_string(), lease_lost || error.is_retryable())
}

/// Where the node is, for `ready`.
pub(crate) fn addresses(mesh: &Mesh) -> (SocketAddr, SocketAddr) {
    (mesh.gossip_addr(), mesh.steal_addr())
}

async fn say(outlet: &Outlet, said: Said) {
    // One who has gone needs no answer.
    let _ = outlet.send(said).await;
}

fn mesh_request(job: JobRequest) -> Result<MeshRequest, EnqueueError> {
    let mut request = MeshRequest::new(&job.handler, &job.arguments)?;
    request.id = job.id.unwrap_or_else(new_job_id);
    request.key = job.key.map(Into::into);
    Ok(request)
}

async fn tell_membership(mesh: Mesh, outlet: Outlet) {
    let mut events = mesh.events();
    let mut present = 0;
    while let Some(event) = events.next().await {
        let change = match &event {
            MembershipEvent::Snapshot { members, .. } => {
                present = members.len() as u32;
                Change::Snapshot
            }
            MembershipEvent::Joined { .. } => {
                present += 1;
                Change::Joined
            }
            MembershipEvent::Updated { .. } => Change::Updated,
            MembershipEvent::Suspected { .. } => Change::Suspected,
            MembershipEvent::Recovered { .. } => Change::Recovered,
            MembershipEvent::Died { .. } => {
                present = present.saturating_sub(1);
                Change::Died
            }
            MembershipEvent::Left { .. } => {
                present = present.saturating_sub(1);
                Change::Left
            }
            // A newer kind of event is no change that this protocol knows.
            _ => Change::Updated,
        };
        let member = event.member().map(|member| member.id.clone());
        let said = Said::Membership { at_us: now_us(), change, member, present };
        if outlet.send(said).await.is_err() {
            return;
        }
    }
}

async fn tell_jobs(mesh: Mesh, outlet: Outlet) {
    let mut events = mesh.job_events(EVENTS_MAX);
    while let Some(first) = events.next().await {
        let mut news = Vec::new();
        let mut missed = take(first, &mut news);
        let until = Instant::now() + NEWS_EVERY;
        while news.len() < NEWS_MAX {
            match timeout_at(until, events.next()).await {
                Ok(Some(event)) => missed += take(event, &mut news),
                Ok(None) | Err(_) => break,
            }
        }
        let told = outlet.send(Said::Jobs { events: news }).await;
        let missed_told = match missed {
            0 => Ok(()),
            events => outlet.send(Said::Missed { events }).await,
        };
        if told.and(missed_told).is_err() {
            return;
        }
    }
}

/// Adds an event to the news; returns how many were missed instead.
fn take(followed: Followed, news: &mut Vec<JobNews>) -> u64 {
    let event = match followed {
        Followed::Missed(events) => return events,
        Followed::Event(event) => event,
    };
    let at_us = now_us();
    news.push(match event {
        JobEvent::Started { job, attempt, stolen, .. } => {
            JobNews::Started { at_us, job, attempt, stolen }
        }
        JobEvent::Ended { job, attempt, stolen, ran, recorded, error, .. } => {
            let ran_us = u64::try_from(ran.as_micros()).unwrap_or(u64::MAX);
            JobNews::Ended { at_us, job, attempt, stolen, ran_us, recorded, error }
        }
        JobEvent::StolenIn { from, jobs } => JobNews::Stolen { at_us, from, jobs: jobs as u32 },
        JobEvent::Requeued { from, buffered, interrupted, .. } => {
            JobNews::Requeued { at_us, from: from.node, buffered, interrupted }
        }
        // A newer kind of event says nothing that this protocol knows.
        _ => return 0,
    });
    0
}

/// Microseconds of the machine's boot clock, which all its processes share.
pub(crate) fn now_us() -> u64 {
    Clock.now().as_micros()
}
