//! What the nodes said of each job.
//!
//! The parent's own record, built from the nodes' events alone: the database is compared with it,
//! never the source of it. The one exception is counted: what a killed node did and could no longer
//! tell is looked up.

use std::collections::HashMap;

use meshwork::protocol::id::{JobId, NodeId};
use meshwork::protocol::job::Recorded;

use crate::cli::digest::Answer;
use crate::cli::protocol::JobNews;

/// What a job came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Succeeded(Answer),
    /// The recorded result is not an answer.
    Garbled(String),
    Failed(String),
}

impl From<&Recorded> for Outcome {
    fn from(recorded: &Recorded) -> Self {
        match recorded {
            Recorded::Succeeded(json) => match serde_json::from_str(json) {
                Ok(answer) => Self::Succeeded(answer),
                Err(_) => Self::Garbled(json.to_string()),
            },
            Recorded::Dead { error, .. } => Self::Failed(error.clone()),
            _ => Self::Failed("it was withdrawn".into()),
        }
    }
}

/// One job's record.
#[derive(Clone, Debug)]
pub(crate) struct JobEntry {
    pub(crate) id: JobId,
    sent_us: u64,
    /// Executions that were begun.
    pub(crate) starts: u32,
    /// Outcomes that were recorded.
    pub(crate) outcomes: u32,
    /// The first of them.
    pub(crate) outcome: Option<Outcome>,
    /// The node that last began it, and whether it had stolen it.
    pub(crate) ran: Option<(usize, bool)>,
    /// Its outcome is the database's word, of this attempt, and counted as this node's: it was killed
    /// before it told, unless another tells it later.
    looked_up: Option<(u32, usize)>,
}

/// One node's record.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NodeEntry {
    pub(crate) enqueued: u64,
    /// Outcomes that it recorded.
    pub(crate) ran: u64,
    pub(crate) stolen_in: u64,
    pub(crate) stolen_out: u64,
    /// From the enqueue of each job to its first start here.
    waits_us: Vec<u64>,
}

impl NodeEntry {
    /// The wait that `percent` of the jobs begun here did not exceed, in milliseconds.
    pub(crate) fn wait_ms(&self, percent: usize) -> Option<f64> {
        let mut waits = self.waits_us.clone();
        let rank = (waits.len() * percent).div_ceil(100).checked_sub(1)?;
        let (_, wait, _) = waits.select_nth_unstable(rank);
        Some(*wait as f64 / 1_000.0)
    }
}

/// The whole record.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) jobs: Vec<JobEntry>,
    pub(crate) nodes: Vec<NodeEntry>,
    by_id: HashMap<JobId, usize>,
    by_name: HashMap<NodeId, usize>,
    pub(crate) done: usize,
    pub(crate) steals: u64,
    pub(crate) stolen: u64,
    pub(crate) requeued: u64,
    pub(crate) looked_up: u64,
    first_sent_us: Option<u64>,
    first_steal_us: Option<u64>,
    last_end_us: Option<u64>,
}

impl Ledger {
    /// An empty record of these nodes and jobs.
    pub(crate) fn new(nodes: &[NodeId], jobs: Vec<JobId>) -> Self {
        let by_id = jobs.iter().enumerate().map(|(seq, id)| (*id, seq)).collect();
        let entry = |id| JobEntry {
            id,
            sent_us: 0,
            starts: 0,
            outcomes: 0,
            outcome: None,
            ran: None,
            looked_up: None,
        };
        Self {
            jobs: jobs.into_iter().map(entry).collect(),
            nodes: vec![NodeEntry::default(); nodes.len()],
            by_id,
            by_name: nodes.iter().cloned().zip(0..).collect(),
            done: 0,
            steals: 0,
            stolen: 0,
            requeued: 0,
            looked_up: 0,
            first_sent_us: None,
            first_steal_us: None,
            last_end_us: None,
        }
    }

    /// Jobs are being sent to `node`.
    pub(crate) fn sent(&mut self, node: usize, seqs: &[usize], at_us: u64) {
        self.first_sent_us.get_or_insert(at_us);
        self.nodes[node].enqueued += seqs.len() as u64;
        for seq in seqs {
            self.jobs[*seq].sent_us = at_us;
        }
    }

    /// What was sent to `node` was not accepted there and goes elsewhere.
    pub(crate) fn taken_back(&mut self, node: usize, jobs: usize) {
        self.nodes[node].enqueued -= jobs as u64;
    }

    /// `node` said this. Jobs of others, in a database that is kept, are passed over.
    pub(crate) fn hear(&mut self, node: usize, news: &JobNews) {
        match news {
            JobNews::Started { at_us, job, stolen, .. } => {
                let Some(seq) = self.by_id.get(job) else { return };
                let job = &mut self.jobs[*seq];
                job.starts += 1;
                job.ran = Some((node, *stolen));
                if job.starts == 1 {
                    self.nodes[node].waits_us.push(at_us.saturating_sub(job.sent_us));
                }
                if *stolen {
                    let first = self.first_steal_us.get_or_insert(*at_us);
                    *first = (*first).min(*at_us);
                }
            }
            JobNews::Ended { at_us, job, attempt, recorded: Some(recorded), stolen, .. } => {
                let Some(&seq) = self.by_id.get(job) else { return };
                self.tell_anew(seq, *attempt);
                let job = &mut self.jobs[seq];
                job.outcomes += 1;
                if job.outcome.is_none() {
                    job.outcome = Some(Outcome::from(recorded));
                    job.ran = Some((node, *stolen));
                    self.done += 1;
                    self.nodes[node].ran += 1;
                    self.last_end_us = self.last_end_us.max(Some(*at_us));
                }
            }
            JobNews::Ended { recorded: None, .. } => {}
            JobNews::Stolen { from, jobs, .. } => {
                self.steals += 1;
                self.stolen += u64::from(*jobs);
                self.nodes[node].stolen_in += u64::from(*jobs);
                if let Some(from) = self.by_name.get(from) {
                    self.nodes[*from].stolen_out += u64::from(*jobs);
                }
            }
            JobNews::Requeued { buffered, interrupted, .. } => {
                let ids = buffered.iter().chain(interrupted);
                self.requeued += ids.filter(|id| self.by_id.contains_key(id)).count() as u64;
            }
        }
    }

    /// The database has this outcome of the given attempt at a job of which no node told one.
    pub(crate) fn look_up(&mut self, id: JobId, attempt: u32, recorded: &Recorded, killed: usize) {
        let Some(seq) = self.by_id.get(&id) else { return };
        let job = &mut self.jobs[*seq];
        if job.outcome.is_none() {
            job.outcome = Some(Outcome::from(recorded));
            job.outcomes = 1;
            job.looked_up = Some((attempt, killed));
            job.ran = Some((killed, false));
            self.done += 1;
            self.looked_up += 1;
            self.nodes[killed].ran += 1;
        }
    }

    /// A node tells what was looked up, if it was: it is no second outcome.
    fn tell_anew(&mut self, seq: usize, attempt: u32) {
        let job = &mut self.jobs[seq];
        if let Some((_, node)) = job.looked_up.take_if(|(looked_up, _)| *looked_up == attempt) {
            job.outcome = None;
            job.outcomes -= 1;
            self.done -= 1;
            self.looked_up -= 1;
            self.nodes[node].ran -= 1;
        }
    }

    /// The jobs without an outcome.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = JobId> {
        self.jobs.iter().filter(|job| job.outcome.is_none()).map(|job| job.id)
    }

    /// Whether every job has an outcome.
    pub(crate) fn is_done(&self) -> bool {
        self.done == self.jobs.len()
    }

    /// From the first enqueue to the first start of a stolen job, in milliseconds.
    pub(crate) fn first_steal_ms(&self) -> Option<f64> {
        Some(self.first_steal_us?.saturating_sub(self.first_sent_us?) as f64 / 1_000.0)
    }

    /// From the first enqueue to the last outcome, in milliseconds.
    pub(crate) fn elapsed_ms(&self) -> Option<f64> {
        Some(self.last_end_us?.saturating_sub(self.first_sent_us?) as f64 / 1_000.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cli::digest::Xxh3Digest;

    const ANSWER: Answer = Answer { xxh3: Xxh3Digest(1), bytes: 2, lines: 3 };

    fn id(n: u8) -> JobId {
        JobId::from_bytes([n; 16])
    }

    fn ledger(jobs: u8) -> Ledger {
        let nodes = ["a", "b"].map(|n| NodeId::new(n).unwrap());
        Ledger::new(&nodes, (0..jobs).map(id).collect())
    }

    fn started(at_us: u64, job: u8, stolen: bool) -> JobNews {
        JobNews::Started { at_us, job: id(job), attempt: 1, stolen }
    }

    fn ended(at_us: u64, job: u8, recorded: Option<Recorded>) -> JobNews {
        let error = None;
        JobNews::Ended {
            at_us,
            job: id(job),
            attempt: 1,
            stolen: false,
            ran_us: 1,
            recorded,
            error,
        }
    }

    fn answer() -> Recorded {
        Recorded::Succeeded(Arc::from(serde_json::to_string(&ANSWER).unwrap()))
    }

    #[test]
    fn a_run_is_counted() {
        let mut ledger = ledger(3);
        ledger.sent(0, &[0, 1], 1_000);
        ledger.sent(1, &[2], 2_000);
        ledger.hear(0, &started(3_000, 0, false));
        let stolen = JobNews::Stolen { at_us: 4_000, from: NodeId::new("a").unwrap(), jobs: 1 };
        ledger.hear(1, &stolen);
        ledger.hear(1, &started(5_000, 1, true));
        ledger.hear(1, &started(4_500, 2, false));
        ledger.hear(1, &ended(9_000, 2, Some(answer())));
        ledger.hear(0, &ended(8_000, 0, Some(answer())));
        assert_eq!(ledger.unfinished().collect::<Vec<_>>(), [id(1)]);
        let dead = Recorded::Dead { error: "gone".into(), attempts: 1 };
        ledger.hear(1, &ended(8_500, 1, Some(dead)));
        assert!(ledger.is_done());
        assert_eq!(ledger.jobs[0].outcome, Some(Outcome::Succeeded(ANSWER)));
        assert_eq!(ledger.jobs[1].outcome, Some(Outcome::Failed("gone".into())));
        assert_eq!((ledger.steals, ledger.stolen), (1, 1));
        assert_eq!(
            (ledger.nodes[0].enqueued, ledger.nodes[0].ran, ledger.nodes[0].stolen_out),
            (2, 1, 1)
        );
        assert_eq!(
            (ledger.nodes[1].enqueued, ledger.nodes[1].ran, ledger.nodes[1].stolen_in),
            (1, 2, 1)
        );
        assert_eq!(ledger.first_steal_ms(), Some(4.0));
        assert_eq!(ledger.elapsed_ms(), Some(8.0));
        assert_eq!(ledger.nodes[1].wait_ms(50), Some(2.5));
        assert_eq!(ledger.nodes[1].wait_ms(99), Some(4.0));
    }

    #[test]
    fn second_outcomes_and_second_starts_are_seen() {
        let mut ledger = ledger(1);
        ledger.sent(0, &[0], 0);
        for node in 0..2 {
            ledger.hear(node, &started(1, 0, false));
            ledger.hear(node, &ended(2, 0, Some(answer())));
        }
        assert_eq!((ledger.jobs[0].starts, ledger.jobs[0].outcomes, ledger.done), (2, 2, 1));
    }

    #[test]
    fn an_attempt_that_is_to_be_repeated_is_no_outcome() {
        let mut ledger = ledger(1);
        ledger.hear(0, &ended(2, 0, None));
        assert_eq!((ledger.jobs[0].outcomes, ledger.done), (0, 0));
    }

    #[test]
    fn what_a_killed_node_could_not_tell_is_looked_up_once() {
        let mut ledger = ledger(1);
        ledger.look_up(id(0), 1, &answer(), 0);
        ledger.look_up(id(0), 1, &answer(), 0);
        assert_eq!((ledger.looked_up, ledger.done, ledger.nodes[0].ran), (1, 1, 1));
        assert_eq!(ledger.jobs[0].ran, Some((0, false)));
    }

    #[test]
    fn what_is_told_after_it_was_looked_up_is_the_same_outcome() {
        let mut ledger = ledger(1);
        ledger.look_up(id(0), 1, &answer(), 0);
        // Not even its start had been told.
        ledger.hear(1, &started(1, 0, false));
        ledger.hear(1, &ended(2, 0, Some(answer())));
        assert_eq!((ledger.looked_up, ledger.done, ledger.jobs[0].outcomes), (0, 1, 1));
        assert_eq!((ledger.nodes[0].ran, ledger.nodes[1].ran), (0, 1));
        ledger.hear(0, &ended(3, 0, Some(answer())));
        assert_eq!((ledger.done, ledger.jobs[0].outcomes), (1, 2), "and once only");
    }

    #[test]
    fn an_outcome_of_another_attempt_than_was_looked_up_is_a_second_one() {
        let mut ledger = ledger(1);
        ledger.look_up(id(0), 2, &answer(), 0);
        ledger.hear(1, &ended(2, 0, Some(answer())));
        assert_eq!((ledger.looked_up, ledger.done, ledger.jobs[0].outcomes), (1, 1, 2));
    }

    #[test]
    fn jobs_of_others_are_passed_over() {
        let mut ledger = ledger(1);
        ledger.hear(0, &started(1, 9, true));
        ledger.hear(0, &ended(1, 9, Some(answer())));
        let from = NodeId::new("a").unwrap();
        let requeued =
            JobNews::Requeued { at_us: 1, from, buffered: vec![id(0), id(9)], interrupted: vec![] };
        ledger.hear(0, &requeued);
        assert_eq!((ledger.done, ledger.requeued, ledger.first_steal_ms()), (0, 1, None));
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let node = |waits: &[u64]| NodeEntry { waits_us: waits.to_vec(), ..NodeEntry::default() };
        assert_eq!(node(&[]).wait_ms(50), None);
        assert_eq!(node(&[7_000]).wait_ms(99), Some(7.0));
        let hundred: Vec<_> = (1..=100).rev().map(|n| n * 1_000).collect();
        assert_eq!(node(&hundred).wait_ms(50), Some(50.0));
        assert_eq!(node(&hundred).wait_ms(99), Some(99.0));
    }
}
