//! `ResultCollector`: tells callers what their jobs and passes came to.
//!
//! Owns the callers that wait, and a bounded memory of recent outcomes. Receives [`Await`] from
//! callers, [`JobEvent`] from this node's actors, [`EndedElsewhere`] from the socket, [`Follow`] from
//! those who watch; of passes, [`ExpectPass`] and [`ExpectPasses`] from PassSubmitter
//! and [`Completed`] from the collector thread of the client. Sends `Lookup` to the store, a `Finished` hint to the node that accepted a job
//! which ended here, and job events to the followers. On death the node stops.
//!
//! A hint only says when to look: the store has the outcome. While anyone waits, a slow poll finds
//! what a lost hint did not tell: the jobs take turns, so that none is passed over however many wait.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::LocalBoxFuture;
use meshwork_protocol::id::{JobId, NodeId};
use meshwork_protocol::job::Recorded;
use meshwork_protocol::limits::FINISHED_IDS_MAX;
use meshwork_protocol::wire::datagram::Body;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::identity::Identity;
use crate::mesh::gossip_socket::EndedElsewhere;
use crate::mesh::hints::Hints;
use crate::store::messages::{JobRow, Lookup, StoreHandle, StoreResult};
use crate::work::job_events::JobEvent;
#[cfg(target_os = "linux")]
use crate::work::pass_awaits::{Completed, ExpectPass, ExpectPasses, PassAwaits};

/// Callers that may wait at once.
const AWAITS_MAX: usize = 1 << 17;

/// Outcomes remembered for callers that ask a little late.
const RECENT_MAX: usize = 4_096;

/// Jobs in one look-up.
const LOOKUP_MAX: usize = 512;

/// Jobs that nobody mentioned and that are looked up all the same, in each [`POLL`]. With
/// [`AWAITS_MAX`] jobs waited for, each has its turn every 32 s.
const TURNS_MAX: usize = 8 * LOOKUP_MAX;

/// How often the store is asked about jobs that someone waits for and nobody mentioned.
const POLL: Duration = Duration::from_secs(1);

/// How long ended jobs of another node are collected before it is told.
const TELL_AFTER: Duration = Duration::from_millis(2);

/// What did this job come to? Answered when it has ended.
#[derive(Message)]
#[rtype(result = "Result<Recorded, AwaitError>")]
pub struct Await(pub JobId);

/// Why nothing is known of a job's outcome.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AwaitError {
    /// Too many callers wait already.
    #[error("{AWAITS_MAX} callers wait for outcomes already")]
    Busy,
    /// The store has no such job.
    #[error("the store has no job {0}")]
    Unknown(JobId),
    /// The node has stopped.
    #[error("the node has stopped")]
    Stopped,
}

impl AwaitError {
    /// Whether asking again later may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy)
    }
}

/// Send every job event of this node to this channel. A follower that falls behind loses events,
/// and is told how many.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Follow(pub mpsc::Sender<Followed>);

/// What a follower gets.
#[derive(Clone, Debug)]
pub enum Followed {
    /// An event.
    Event(JobEvent),
    /// So many events were lost since the last one: the channel was full.
    Missed(u64),
}

#[derive(Message)]
#[rtype(result = "()")]
struct LookedUp {
    asked: Vec<JobId>,
    answer: StoreResult<Vec<JobRow>>,
}

/// Whom the collector tells.
pub struct Peers {
    /// The store.
    pub store: StoreHandle,
    /// The nodes that accepted what ends here.
    pub hints: Hints,
}

/// The actor.
pub struct ResultCollector {
    /// Nothing of jobs where there is no node: in a process that only has passes.
    jobs: Option<Jobs>,
    #[cfg(target_os = "linux")]
    passes: PassAwaits,
    waiting: HashMap<JobId, Vec<oneshot::Sender<Result<Recorded, AwaitError>>>>,
    waiting_count: usize,
    recent: HashMap<JobId, Recorded>,
    recent_order: VecDeque<JobId>,
    to_look_up: LookupQueue,
    looking: bool,
    to_tell: BTreeMap<NodeId, Vec<JobId>>,
    followers: Vec<Follower>,
}

struct Jobs {
    identity: Arc<Identity>,
    peers: Peers,
}

struct Follower {
    sender: mpsc::Sender<Followed>,
    missed: u64,
}

/// First in, first out, each job once.
#[derive(Default)]
struct Fifo {
    order: VecDeque<JobId>,
    queued: HashSet<JobId>,
}

impl Fifo {
    fn push(&mut self, job: JobId) {
        if self.queued.insert(job) {
            self.order.push_back(job);
        }
    }

    fn pop(&mut self) -> Option<JobId> {
        let job = self.order.pop_front()?;
        self.queued.remove(&job);
        Some(job)
    }

    fn retain(&mut self, keep: impl Fn(&JobId) -> bool) {
        self.order.retain(&keep);
        self.queued.retain(keep);
    }
}

/// Which jobs to look up next: those mentioned, in the order of their mention, and then those whose
/// turn it is. Holds about as many as are waited for.
#[derive(Default)]
struct LookupQueue {
    mentioned: Fifo,
    /// Every job that is waited for, the one looked up longest ago first.
    turns: Fifo,
    /// Turns still to be given before the next poll.
    due: usize,
}

impl LookupQueue {
    /// Someone waits for this job now: it may have ended already.
    fn add(&mut self, job: JobId) {
        self.mentioned.push(job);
        self.turns.push(job);
    }

    /// There may be news of this job.
    fn mention(&mut self, job: JobId) {
        self.mentioned.push(job);
    }

    /// Gives up to [`TURNS_MAX`] turns, and forgets what nobody waits for any more.
    fn begin_turns(&mut self, is_waited_for: impl Fn(&JobId) -> bool) {
        self.turns.retain(&is_waited_for);
        self.mentioned.retain(is_waited_for);
        self.due = self.turns.order.len().min(TURNS_MAX);
    }

    /// Up to [`LOOKUP_MAX`] jobs, each once.
    fn next_batch(&mut self, is_waited_for: impl Fn(&JobId) -> bool) -> Vec<JobId> {
        let mut batch = Fifo::default();
        while batch.order.len() < LOOKUP_MAX
            && let Some(job) = self.mentioned.pop()
        {
            if is_waited_for(&job) {
                batch.push(job);
            }
        }
        while batch.order.len() < LOOKUP_MAX
            && self.due > 0
            && let Some(job) = self.turns.pop()
        {
            self.due -= 1;
            if is_waited_for(&job) {
                self.turns.push(job);
                batch.push(job);
            }
        }
        batch.order.into()
    }
}

impl ResultCollector {
    /// A collector that nobody waits at yet.
    pub fn new(identity: Arc<Identity>, peers: Peers) -> Self {
        Self { jobs: Some(Jobs { identity, peers }), ..Self::without_jobs() }
    }

    /// A collector of passes alone: it knows of no job.
    pub fn without_jobs() -> Self {
        Self {
            jobs: None,
            #[cfg(target_os = "linux")]
            passes: PassAwaits::default(),
            waiting: HashMap::new(),
            waiting_count: 0,
            recent: HashMap::new(),
            recent_order: VecDeque::new(),
            to_look_up: LookupQueue::default(),
            looking: false,
            to_tell: BTreeMap::new(),
            followers: Vec::new(),
        }
    }

    fn ended(&mut self, job: JobId, recorded: Recorded) {
        for waiter in self.waiting.remove(&job).unwrap_or_default() {
            self.waiting_count -= 1;
            // A caller may have given up.
            let _ = waiter.send(Ok(recorded.clone()));
        }
        if self.recent.insert(job, recorded).is_none() {
            self.recent_order.push_back(job);
            if self.recent_order.len() > RECENT_MAX
                && let Some(oldest) = self.recent_order.pop_front()
            {
                self.recent.remove(&oldest);
            }
        }
    }

    fn look_up(&mut self, ctx: &mut Context<Self>) {
        let Some(Jobs { peers, .. }) = &self.jobs else { return };
        if self.looking {
            return;
        }
        let jobs = self.to_look_up.next_batch(|job| self.waiting.contains_key(job));
        if jobs.is_empty() {
            return;
        }
        self.looking = true;
        let lookup = peers.store.lookup.send(Lookup { jobs: jobs.clone() });
        let me = ctx.address();
        actix::spawn(async move {
            // A store that has stopped ends the node; nothing is left to answer then.
            if let Ok(answer) = lookup.await {
                me.do_send(LookedUp { asked: jobs, answer });
            }
        });
    }

    fn tell_origins(&mut self) {
        let Some(Jobs { peers, .. }) = &self.jobs else { return };
        for (node, jobs) in std::mem::take(&mut self.to_tell) {
            for jobs in jobs.chunks(FINISHED_IDS_MAX) {
                peers.hints.send(&node, Body::Finished { jobs: jobs.to_vec() });
            }
        }
    }

    fn follow(&mut self, event: &JobEvent) {
        self.followers.retain_mut(|follower| {
            if follower.missed > 0 {
                match follower.sender.try_send(Followed::Missed(follower.missed)) {
                    Ok(()) => follower.missed = 0,
                    Err(TrySendError::Full(_)) => {
                        follower.missed += 1;
                        return true;
                    }
                    Err(TrySendError::Closed(_)) => return false,
                }
            }
            match follower.sender.try_send(Followed::Event(event.clone())) {
                Ok(()) => true,
                Err(TrySendError::Full(_)) => {
                    follower.missed += 1;
                    true
                }
                Err(TrySendError::Closed(_)) => false,
            }
        });
    }
}

impl Actor for ResultCollector {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(POLL, |collector, ctx| {
            collector.waiting.retain(|_, waiters| {
                let before = waiters.len();
                waiters.retain(|waiter| !waiter.is_closed());
                collector.waiting_count -= before - waiters.len();
                !waiters.is_empty()
            });
            collector.to_look_up.begin_turns(|job| collector.waiting.contains_key(job));
            collector.look_up(ctx);
        });
    }
}

impl Handler<Await> for ResultCollector {
    type Result = LocalBoxFuture<'static, Result<Recorded, AwaitError>>;

    fn handle(&mut self, Await(job): Await, ctx: &mut Self::Context) -> Self::Result {
        if let Some(recorded) = self.recent.get(&job) {
            let recorded = recorded.clone();
            return Box::pin(async move { Ok(recorded) });
        }
        if self.jobs.is_none() {
            return Box::pin(async move { Err(AwaitError::Unknown(job)) });
        }
        if self.waiting_count >= AWAITS_MAX {
            return Box::pin(async { Err(AwaitError::Busy) });
        }
        let (sender, receiver) = oneshot::channel();
        self.waiting.entry(job).or_default().push(sender);
        self.waiting_count += 1;
        self.to_look_up.add(job);
        self.look_up(ctx);
        Box::pin(async move { receiver.await.unwrap_or(Err(AwaitError::Stopped)) })
    }
}

impl Handler<LookedUp> for ResultCollector {
    type Result = ();

    fn handle(&mut self, LookedUp { asked, answer }: LookedUp, ctx: &mut Self::Context) {
        self.looking = false;
        match answer {
            Ok(rows) => {
                for job in asked {
                    match rows.iter().find(|row| row.id == job) {
                        Some(JobRow { recorded: Some(recorded), .. }) => {
                            self.ended(job, recorded.clone());
                        }
                        Some(_) => {}
                        None => {
                            for waiter in self.waiting.remove(&job).unwrap_or_default() {
                                self.waiting_count -= 1;
                                // A caller may have given up.
                                let _ = waiter.send(Err(AwaitError::Unknown(job)));
                            }
                        }
                    }
                }
            }
            // Their next turn asks again.
            Err(error) => tracing::warn!(%error, "outcomes could not be looked up"),
        }
        self.look_up(ctx);
    }
}

impl Handler<EndedElsewhere> for ResultCollector {
    type Result = ();

    fn handle(&mut self, EndedElsewhere { jobs }: EndedElsewhere, ctx: &mut Self::Context) {
        for job in jobs.into_iter().filter(|job| self.waiting.contains_key(job)) {
            self.to_look_up.mention(job);
        }
        self.look_up(ctx);
    }
}

impl Handler<JobEvent> for ResultCollector {
    type Result = ();

    fn handle(&mut self, event: JobEvent, ctx: &mut Self::Context) {
        self.follow(&event);
        if let JobEvent::Ended { job, origin, recorded: Some(recorded), .. } = event {
            if self.jobs.as_ref().is_some_and(|jobs| jobs.identity.node != origin) {
                if self.to_tell.is_empty() {
                    ctx.run_later(TELL_AFTER, |collector, _| collector.tell_origins());
                }
                self.to_tell.entry(origin).or_default().push(job);
            }
            self.ended(job, recorded);
        }
    }
}

impl Handler<Follow> for ResultCollector {
    type Result = ();

    fn handle(&mut self, Follow(sender): Follow, _: &mut Self::Context) {
        self.followers.push(Follower { sender, missed: 0 });
    }
}

#[cfg(target_os = "linux")]
impl Handler<ExpectPass> for ResultCollector {
    type Result = ();

    fn handle(&mut self, expected: ExpectPass, _: &mut Self::Context) {
        self.passes.expect_one(expected);
    }
}

#[cfg(target_os = "linux")]
impl Handler<ExpectPasses> for ResultCollector {
    type Result = ();

    fn handle(&mut self, expected: ExpectPasses, _: &mut Self::Context) {
        self.passes.expect_many(expected);
    }
}

#[cfg(target_os = "linux")]
impl Handler<Completed> for ResultCollector {
    type Result = ();

    fn handle(&mut self, Completed(ends): Completed, _: &mut Self::Context) {
        for end in ends {
            self.passes.ended(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: usize) -> JobId {
        JobId::from_bytes((n as u128).to_be_bytes())
    }

    fn ids(numbers: impl IntoIterator<Item = usize>) -> Vec<JobId> {
        numbers.into_iter().map(id).collect()
    }

    /// A queue of so many jobs whose first look-up is done.
    fn looked_up_once(jobs: usize) -> LookupQueue {
        let mut queue = LookupQueue::default();
        (0..jobs).for_each(|n| queue.add(id(n)));
        while !queue.next_batch(|_| true).is_empty() {}
        queue
    }

    #[test]
    fn a_new_job_is_looked_up_at_once_and_then_in_its_turn() {
        let mut queue = LookupQueue::default();
        queue.add(id(2));
        queue.add(id(1));
        queue.add(id(2));
        assert_eq!(queue.next_batch(|_| true), ids([2, 1]));
        assert_eq!(queue.next_batch(|_| true), []);
        queue.begin_turns(|_| true);
        assert_eq!(queue.next_batch(|_| true), ids([2, 1]));
        assert_eq!(queue.next_batch(|_| true), []);
    }

    #[test]
    fn a_mentioned_job_goes_ahead_of_the_turns_and_is_asked_for_once() {
        let mut queue = looked_up_once(600);
        queue.begin_turns(|_| true);
        queue.mention(id(3));
        queue.mention(id(599));
        let first = queue.next_batch(|_| true);
        assert_eq!(first, ids([3, 599].into_iter().chain(0..3).chain(4..511)));
        assert_eq!(queue.next_batch(|_| true), ids(511..600));
    }

    #[test]
    fn polls_give_a_bounded_number_of_turns_and_pass_over_nobody() {
        let jobs = 2 * TURNS_MAX + 1;
        let mut queue = looked_up_once(jobs);
        let mut poll = || {
            queue.begin_turns(|_| true);
            let batches = std::iter::from_fn(|| Some(queue.next_batch(|_| true)));
            batches.take_while(|batch| !batch.is_empty()).flatten().collect::<Vec<_>>()
        };
        assert_eq!(poll(), ids(0..TURNS_MAX));
        assert_eq!(poll(), ids(TURNS_MAX..2 * TURNS_MAX));
        assert_eq!(poll(), ids((2 * TURNS_MAX..jobs).chain(0..TURNS_MAX - 1)));
    }

    #[test]
    fn what_nobody_waits_for_is_forgotten() {
        let mut queue = looked_up_once(4);
        queue.mention(id(2));
        queue.begin_turns(|job| *job == id(1));
        assert_eq!(queue.turns.order, [id(1)]);
        assert_eq!(queue.turns.queued, HashSet::from([id(1)]));
        assert_eq!(queue.next_batch(|_| true), ids([1]));
    }
}
