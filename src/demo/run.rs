//! One run, as the parent lives it: start the nodes, give them work, hear what they do, and end
//! them, whatever happens. Every wait has a bound.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use meshwork::JobId;
use meshwork::JobRow;
use meshwork::actors::store::messages::{Close, CountJobs, Lookup, StoreHandle};
use meshwork::protocol::job::JobState;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};

use crate::cli::digest::Digest;
use crate::cli::protocol::{Asked, Change, JobNews, JobRequest, Peer, Request, Said, Status};
use crate::cli::service::now_us;
use crate::cli::signals::Signals;
use crate::demo::fleet::{Fleet, Heard};
use crate::demo::ledger::Ledger;
use crate::demo::plan::Batch;
use crate::demo::report::grouped;
use crate::demo::screen::Screen;

/// Requests to one node that are not answered yet.
const UNANSWERED_MAX: usize = 4;
/// Nodes that start at the same time: more would only wait for each other's turn at the database.
const STARTING_MAX: usize = 5;
/// Lines of a node's stderr that are passed on.
const COMPLAINTS_MAX: usize = 20;
/// How often what is not driven by a node's word is looked at.
const TICK: Duration = Duration::from_millis(50);
/// Pause before a busy node is asked again.
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// Quiet after which the database is asked for what a node could not tell.
const LOOK_UP_AFTER: Duration = Duration::from_millis(500);
/// Jobs in one look-up.
const LOOK_UP_JOBS: usize = 500;
/// Time for the database to answer.
const STORE_LIMIT: Duration = Duration::from_secs(10);
/// Time for nodes to say what they see.
const STATUS_LIMIT: Duration = Duration::from_secs(2);
/// Time without any progress after which the run has failed.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// Why a run ended before it was done.
#[derive(Debug)]
pub(crate) enum Stop {
    /// By this signal.
    Interrupted(i32),
    /// Nobody reads what it says.
    OutputClosed,
    Failed(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Failed(format!("the output cannot be written: {error}")),
        }
    }
}

/// Whom to kill, and at how many ended jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KillAt {
    pub(crate) node: usize,
    pub(crate) done: usize,
}

/// What a run is made of.
pub(crate) struct Parts {
    pub(crate) names: Vec<String>,
    pub(crate) fleet: Fleet,
    pub(crate) screen: Screen,
    pub(crate) signals: Signals,
    pub(crate) store: StoreHandle,
    pub(crate) ledger: Ledger,
    /// The job of each number.
    pub(crate) job: Box<dyn Fn(usize) -> Digest>,
    pub(crate) batches: Vec<VecDeque<Batch>>,
    pub(crate) kill: Option<KillAt>,
    /// How long a job waits, at least: no progress for that long means nothing.
    pub(crate) work: Duration,
}

/// The run.
pub(crate) struct Run {
    parts: Parts,
    nodes: Vec<Node>,
    /// What was asked and is not answered, by the request's number.
    unanswered: HashMap<u64, (usize, Batch)>,
    next_request: u64,
    killed: Option<usize>,
    /// A node that did things it has not told, because it was killed or did not keep up.
    untold: Option<usize>,
    started_us: u64,
    working: bool,
    progress: Instant,
    looked_up: Instant,
    ticks: Interval,
}

#[derive(Default)]
struct Node {
    addresses: Option<(SocketAddr, SocketAddr)>,
    joining: bool,
    present: usize,
    /// Since when it sees every node.
    converged_us: Option<u64>,
    /// Its answer to the last question for its status.
    status: Option<Box<Status>>,
    unanswered: usize,
    /// Not to be asked before this.
    busy_until: Option<Instant>,
    complaints: usize,
}

impl Run {
    pub(crate) fn new(parts: Parts) -> Self {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            nodes: parts.names.iter().map(|_| Node::default()).collect(),
            unanswered: HashMap::new(),
            next_request: 1,
            killed: None,
            untold: None,
            started_us: 0,
            working: false,
            progress: Instant::now(),
            looked_up: Instant::now(),
            ticks,
            parts,
        }
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.parts.ledger
    }

    pub(crate) fn screen(&mut self) -> &mut Screen {
        &mut self.parts.screen
    }

    pub(crate) fn killed(&self) -> Option<usize> {
        self.killed
    }

    /// From the start of the mesh until every node saw every other; none before.
    pub(crate) fn converged_ms(&self) -> Option<f64> {
        let seen = self.nodes.iter().map(|node| node.converged_us);
        let last = seen.collect::<Option<Vec<_>>>()?.into_iter().max()?;
        Some(last.saturating_sub(self.started_us) as f64 / 1_000.0)
    }

    /// Waits until the nodes are up, joins them to a mesh, and waits until each sees all.
    pub(crate) async fn form_mesh(&mut self) -> Result<f64, Stop> {
        for _ in 0..STARTING_MAX {
            self.start_next()?;
        }
        self.until("nodes to start", |run| run.nodes.iter().all(|n| n.addresses.is_some())).await?;
        let addresses: Vec<_> = self.nodes.iter().filter_map(|node| node.addresses).collect();
        let peers: Vec<_> = addresses
            .iter()
            .zip(&self.parts.names)
            .map(|((gossip, steal), name)| Peer {
                region: name.clone(),
                gossip: *gossip,
                steal: *steal,
            })
            .collect();
        self.started_us = now_us();
        for node in 0..self.nodes.len() {
            self.ask(node, Request::Watch);
            // The first node is everyone's seed, the second its own.
            let seed = if node == 0 { addresses.get(1) } else { addresses.first() };
            let seeds = seed.iter().map(|(gossip, _)| gossip.to_string()).collect();
            self.ask(node, Request::Start { peers: peers.clone(), seeds });
        }
        self.until("nodes to see each other", |run| {
            run.nodes.iter().all(|node| node.joining) && run.converged_ms().is_some()
        })
        .await?;
        Ok(self.converged_ms().expect("it was waited for"))
    }

    /// Gives out the jobs, and waits until each has an outcome and nodes have told all.
    pub(crate) async fn do_work(&mut self) -> Result<(), Stop> {
        self.working = true;
        self.parts.screen.start_bar(self.parts.ledger.jobs.len());
        for node in 0..self.nodes.len() {
            self.send_batches(node);
        }
        let done = self.until("jobs to end", |run| run.parts.ledger.is_done()).await;
        self.parts.screen.flush_steals()?;
        self.parts.screen.end_bar();
        done?;
        self.ask_statuses().await
    }

    /// Rows of the jobs, from the database.
    pub(crate) async fn rows(&self) -> Result<HashMap<JobId, JobRow>, Stop> {
        let ids: Vec<_> = self.parts.ledger.jobs.iter().map(|job| job.id).collect();
        Ok(self.look_up(&ids).await?.into_iter().map(|row| (row.id, row)).collect())
    }

    /// Ends the nodes.
    pub(crate) async fn end_nodes(&mut self) {
        self.parts.fleet.end().await;
    }

    /// Ends the nodes, and closes the database: as the last to do so, this tidies its files up.
    pub(crate) async fn end(mut self) {
        self.end_nodes().await;
        // A database that does not answer is left as it is; it is whole all the same.
        let _ = timeout(STORE_LIMIT, self.parts.store.close.send(Close)).await;
    }

    /// Lives on until `done`; what the nodes say changes the run's state.
    async fn until(&mut self, what: &str, done: fn(&Self) -> bool) -> Result<(), Stop> {
        self.progress = Instant::now();
        while !done(self) {
            tokio::select! {
                (node, heard) = self.parts.fleet.hear() => self.heard(node, heard)?,
                signal = self.parts.signals.next() => return Err(Stop::Interrupted(signal)),
                _ = self.ticks.tick() => self.tick().await?,
            }
            if self.progress.elapsed() > STUCK_AFTER + 2 * self.parts.work {
                return Err(self.stuck(what).await);
            }
        }
        Ok(())
    }

    /// Waits for what is computed beside the run; the nodes are heard meanwhile.
    pub(crate) async fn wait_for<T>(
        &mut self,
        mut receiver: tokio::sync::oneshot::Receiver<T>,
    ) -> Result<T, Stop> {
        loop {
            tokio::select! {
                value = &mut receiver => {
                    return value.map_err(|_| Stop::Failed("a thread has panicked".into()));
                }
                (node, heard) = self.parts.fleet.hear() => self.heard(node, heard)?,
                signal = self.parts.signals.next() => return Err(Stop::Interrupted(signal)),
            }
        }
    }

    fn start_next(&mut self) -> Result<(), Stop> {
        let started = self.parts.fleet.start_next();
        started.map_err(|e| Stop::Failed(format!("a node cannot be started: {e}")))
    }

    fn ask(&mut self, node: usize, request: Request) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.parts.fleet.ask(node, &Asked { id, request });
        id
    }

    fn send_batches(&mut self, node: usize) {
        let busy = |at: Instant| at > Instant::now();
        while self.nodes[node].unanswered < UNANSWERED_MAX
            && !self.nodes[node].busy_until.is_some_and(busy)
            && let Some(batch) = self.parts.batches[node].pop_front()
        {
            let job = |seq: &usize| JobRequest {
                id: Some(self.parts.ledger.jobs[*seq].id),
                handler: <Digest as meshwork::Job>::NAME.into(),
                arguments: serde_json::to_value((self.parts.job)(*seq))
                    .expect("a digest's arguments are JSON"),
                key: None,
            };
            let jobs = batch.iter().map(job).collect();
            self.parts.ledger.sent(node, &batch, now_us());
            let id = self.ask(node, Request::Enqueue { jobs });
            self.nodes[node].unanswered += 1;
            self.unanswered.insert(id, (node, batch));
        }
    }

    fn heard(&mut self, node: usize, heard: Heard) -> Result<(), Stop> {
        match heard {
            Heard::Said(said) => self.said(node, *said),
            Heard::Complained(line) => {
                self.complained(node, &line);
                Ok(())
            }
            Heard::Garbled(what) => {
                Err(self.fault(node, &format!("says what no node says: {what}")))
            }
            Heard::Exited(_) if self.killed == Some(node) => Ok(()),
            Heard::Exited(Ok(status)) => {
                Err(self.fault(node, &format!("has ended by itself: {status}")))
            }
            Heard::Exited(Err(e)) => Err(self.fault(node, &format!("cannot be waited for: {e}"))),
        }
    }

    fn complained(&mut self, node: usize, line: &str) {
        let state = &mut self.nodes[node];
        state.complaints += 1;
        if state.complaints <= COMPLAINTS_MAX {
            self.parts.screen.problem(&format!("  {}: {line}", self.parts.names[node]));
        }
    }

    fn fault(&self, node: usize, what: &str) -> Stop {
        Stop::Failed(format!("{} {what}", self.parts.names[node]))
    }

    fn said(&mut self, node: usize, said: Said) -> Result<(), Stop> {
        match said {
            Said::Ready { gossip, steal, .. } => {
                self.nodes[node].addresses = Some((gossip, steal));
                self.start_next()?;
                self.progress = Instant::now();
            }
            Said::Started { .. } => self.nodes[node].joining = true,
            Said::Watching { .. } => {}
            Said::Status { status, .. } => self.nodes[node].status = Some(status),
            Said::Enqueued { re, .. } => {
                if self.unanswered.remove(&re).is_some() {
                    self.nodes[node].unanswered -= 1;
                    self.progress = Instant::now();
                    self.send_batches(node);
                }
            }
            Said::Error { re, message, retryable } => match self.unanswered.remove(&re) {
                Some((_, batch)) if retryable => {
                    self.nodes[node].unanswered -= 1;
                    self.nodes[node].busy_until = Some(Instant::now() + RETRY_AFTER);
                    self.parts.ledger.taken_back(node, batch.len());
                    self.parts.batches[node].push_front(batch);
                }
                _ => return Err(self.fault(node, &format!("refuses: {message}"))),
            },
            Said::Membership { at_us, change, member, present } => {
                self.membership(node, at_us, present as usize);
                if let Some(member) = member {
                    let by = &self.parts.names[node];
                    self.parts.screen.membership(by, change, member.as_str())?;
                    if change == Change::Joined {
                        self.progress = Instant::now();
                    }
                }
            }
            Said::Jobs { events } => self.news(node, &events)?,
            Said::Missed { events } => {
                self.untold = Some(node);
                let name = &self.parts.names[node];
                self.parts.screen.problem(&format!("  {name} could not tell {events} events"));
            }
            Said::Stopped { reason } => {
                return Err(self.fault(node, &format!("has stopped: {reason}")));
            }
        }
        Ok(())
    }

    fn membership(&mut self, node: usize, at_us: u64, present: usize) {
        let all = self.nodes.len();
        let state = &mut self.nodes[node];
        state.present = present;
        if present < all && self.killed.is_none() {
            state.converged_us = None;
        } else if present == all {
            state.converged_us.get_or_insert(at_us);
        }
    }

    fn news(&mut self, node: usize, events: &[JobNews]) -> Result<(), Stop> {
        let done = self.parts.ledger.done;
        for event in events {
            self.parts.ledger.hear(node, event);
            match event {
                JobNews::Stolen { from, jobs, .. } => {
                    self.parts.screen.steal(&self.parts.names[node], from.as_str(), *jobs)?;
                }
                JobNews::Requeued { from, buffered, interrupted, .. } => {
                    let by = &self.parts.names[node];
                    let (buffered, interrupted) = (buffered.len(), interrupted.len());
                    self.parts.screen.live(&format!(
                        "{by} requeues the jobs of {from}: {} that waited, {} that ran",
                        grouped(buffered as u64),
                        grouped(interrupted as u64),
                    ))?;
                    self.progress = Instant::now();
                }
                JobNews::Started { .. } | JobNews::Ended { .. } => {}
            }
        }
        if self.parts.ledger.done > done {
            self.progress = Instant::now();
            self.parts.screen.progress(self.parts.ledger.done, self.parts.ledger.stolen);
        }
        self.kill_when_due()
    }

    fn kill_when_due(&mut self) -> Result<(), Stop> {
        let done = self.parts.ledger.done;
        let Some(KillAt { node, .. }) = self.parts.kill.take_if(|kill| done >= kill.done) else {
            return Ok(());
        };
        self.parts.fleet.kill(node);
        self.killed = Some(node);
        self.untold = Some(node);
        let of = grouped(self.parts.ledger.jobs.len() as u64);
        let name = &self.parts.names[node];
        self.parts.screen.live(&format!(
            "{name} is killed (SIGKILL) with {} of {of} jobs done",
            grouped(done as u64)
        ))?;
        self.give_to_others(node);
        Ok(())
    }

    /// What a killed node had not accepted for certain goes to the next. The jobs' ids make sure
    /// that none is there twice.
    fn give_to_others(&mut self, node: usize) {
        let mut batches = std::mem::take(&mut self.parts.batches[node]);
        let lost =
            self.unanswered.extract_if(|_, (to, _)| *to == node).map(|(_, (_, batch))| batch);
        for batch in lost {
            self.parts.ledger.taken_back(node, batch.len());
            batches.push_back(batch);
        }
        let next = (node + 1) % self.nodes.len();
        self.parts.batches[next].extend(batches);
        self.send_batches(next);
    }

    async fn tick(&mut self) -> Result<(), Stop> {
        if !self.working {
            return Ok(());
        }
        self.parts.screen.flush_steals()?;
        for node in 0..self.nodes.len() {
            if self.killed != Some(node) {
                self.send_batches(node);
            }
        }
        // A kill of the first jobs is due before any has ended.
        if self.unanswered.is_empty() {
            self.kill_when_due()?;
        }
        if let Some(node) = self.untold
            && self.progress.elapsed() > LOOK_UP_AFTER
            && self.looked_up.elapsed() > LOOK_UP_AFTER
        {
            self.look_up_untold(node).await?;
            self.looked_up = Instant::now();
        }
        Ok(())
    }

    /// Asks the database for outcomes that a node had no time to tell.
    async fn look_up_untold(&mut self, node: usize) -> Result<(), Stop> {
        let ids: Vec<_> = self.parts.ledger.unfinished().collect();
        for row in self.look_up(&ids).await? {
            if let Some(recorded) = &row.recorded {
                self.parts.ledger.look_up(row.id, row.attempts, recorded, node);
            }
        }
        Ok(())
    }

    async fn look_up(&self, ids: &[JobId]) -> Result<Vec<JobRow>, Stop> {
        let failed = |what: String| Stop::Failed(format!("the database does not answer: {what}"));
        let mut rows = Vec::with_capacity(ids.len());
        for ids in ids.chunks(LOOK_UP_JOBS) {
            let sent = self.parts.store.lookup.send(Lookup { jobs: ids.to_vec() });
            let answer = timeout(STORE_LIMIT, sent).await.map_err(|e| failed(e.to_string()))?;
            let found = answer.map_err(|e| failed(e.to_string()))?;
            rows.extend(found.map_err(|e| failed(e.to_string()))?);
        }
        Ok(rows)
    }

    /// Asks every node for its status, and waits for the answers, within a bound.
    async fn ask_statuses(&mut self) -> Result<(), Stop> {
        for node in 0..self.nodes.len() {
            self.nodes[node].status = None;
            self.ask(node, Request::Status);
        }
        let until = Instant::now() + STATUS_LIMIT;
        while self
            .nodes
            .iter()
            .enumerate()
            .any(|(i, n)| n.status.is_none() && self.killed != Some(i))
        {
            tokio::select! {
                (node, heard) = self.parts.fleet.hear() => self.heard(node, heard)?,
                signal = self.parts.signals.next() => return Err(Stop::Interrupted(signal)),
                () = tokio::time::sleep_until(until) => break,
            }
        }
        Ok(())
    }

    /// Says where things are when nothing moves.
    async fn stuck(&mut self, what: &str) -> Stop {
        let waited = self.progress.elapsed().as_secs();
        let mut text = format!("nothing has moved for {waited} s while waiting for {what}\n");
        if let Err(stop @ Stop::Interrupted(_)) = self.ask_statuses().await {
            return stop;
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let ended = self.parts.ledger.nodes[index].ran;
            let unsent = self.parts.batches[index].len();
            let says = match (&node.status, self.killed == Some(index)) {
                (_, true) => "killed".into(),
                (None, _) if node.addresses.is_none() => "has not said that it is ready".into(),
                (None, _) => "does not answer".into(),
                (Some(s), _) => format!(
                    "deque {}, running {}, sees {} nodes",
                    s.load.queued, s.load.running, node.present
                ),
            };
            text.push_str(&format!(
                "  {}: {says}; {ended} jobs ended, {} requests unanswered, {unsent} unsent\n",
                self.parts.names[index], node.unanswered
            ));
        }
        let counts = timeout(STORE_LIMIT, self.parts.store.count.send(CountJobs)).await;
        match counts {
            Ok(Ok(Ok(counts))) => {
                let row = |state: JobState| match counts.of(state) {
                    0 => None,
                    n => Some(format!("{n} {state}")),
                };
                let rows: Vec<_> = JobState::ALL.into_iter().filter_map(row).collect();
                text.push_str(&format!("  database: {}", rows.join(", ")));
            }
            _ => text.push_str("  database: it does not answer"),
        }
        Stop::Failed(text)
    }
}
