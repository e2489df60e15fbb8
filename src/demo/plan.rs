//! Who gets what: the skew of the work, and the settings that stealing needs on such links.

use std::collections::VecDeque;
use std::time::Duration;

use crate::demo::regions::longest_round_trip;

/// Slots of a node.
pub(crate) const SLOTS: usize = 4;
/// The lease's term: short, so that a killed node's jobs are soon requeued.
const LEASE: Duration = Duration::from_secs(3);
/// Nodes for which that term is long enough, on a machine with two cores.
const LEASE_NODES: usize = 10;
/// Jobs in one request: its line is some tens of kilobytes.
const BATCH_JOBS: usize = 100;
/// Least room of a deque.
const BUFFER_MIN: usize = 64;
/// What a node does without emulated latency: the defaults of the protocol.
const STEAL_THRESHOLD: usize = 2;
const STEAL_BATCH: usize = 16;
/// Steals a second from one peer. Ten times the default: a thief that fills its deque asks in
/// several steps, and here there are but two victims.
const STEAL_RATE_LIMIT: u32 = 100;
/// Most jobs of one steal over a slow link.
const STEAL_BATCH_MAX: usize = 256;

/// Jobs of one request, by their numbers.
pub(crate) type Batch = Vec<usize>;

/// How many of the first nodes get four of five jobs: two, as long as others are left to steal.
pub(crate) fn busy_nodes(nodes: usize) -> usize {
    nodes.saturating_sub(1).clamp(1, 2)
}

/// The node to which job number `seq` is given.
pub(crate) fn home(seq: usize, nodes: usize) -> usize {
    let busy = busy_nodes(nodes);
    let (round, place) = (seq / 5, seq % 5);
    if place < 4 || nodes == busy {
        (4 * round + place) % busy
    } else {
        busy + round % (nodes - busy)
    }
}

/// What each node is given, in requests.
pub(crate) fn batches(jobs: usize, nodes: usize) -> Vec<VecDeque<Batch>> {
    let mut batches = vec![VecDeque::<Batch>::new(); nodes];
    for seq in 0..jobs {
        let queue = &mut batches[home(seq, nodes)];
        match queue.back_mut().filter(|batch| batch.len() < BATCH_JOBS) {
            Some(batch) => batch.push(seq),
            None => queue.push_back(vec![seq]),
        }
    }
    batches
}

/// The lease's term for so many nodes. All renew in turn, in one file: with many, a node waits for
/// its turn as long as the short term lasts.
pub(crate) fn lease(nodes: usize) -> Duration {
    LEASE * nodes.div_ceil(LEASE_NODES) as u32
}

/// How the nodes steal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stealing {
    pub(crate) threshold: usize,
    pub(crate) batch: usize,
    /// Steals a second from one peer; 0: no limit.
    pub(crate) rate_limit: u32,
}

impl Stealing {
    /// The protocol's defaults suit a round trip shorter than a job. Over a longer one a thief must
    /// ask before it is idle: while a steal is under way, its slots run what is left.
    pub(crate) fn on(latency: bool, nodes: usize, work_ms: u32) -> Self {
        if !latency {
            return Self {
                threshold: STEAL_THRESHOLD,
                batch: STEAL_BATCH,
                rate_limit: STEAL_RATE_LIMIT,
            };
        }
        let round_trip_ms = longest_round_trip(nodes).as_millis() as usize;
        let run_meanwhile = (SLOTS * round_trip_ms).div_ceil(work_ms.max(1) as usize);
        let batch = (2 * run_meanwhile).clamp(STEAL_BATCH, STEAL_BATCH_MAX);
        let threshold = run_meanwhile.clamp(STEAL_THRESHOLD, batch / 2);
        Self { threshold, batch, rate_limit: STEAL_RATE_LIMIT }
    }
}

/// Room of node number `node`'s deque. The busy nodes hold all that they are given, so that nothing
/// waits in the store for idle ones to claim.
pub(crate) fn buffer(node: usize, nodes: usize, jobs: usize, stealing: Stealing) -> usize {
    let least = BUFFER_MIN.max(stealing.threshold + stealing.batch);
    if node < busy_nodes(nodes) { least.max(jobs) } else { least }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(jobs: usize, nodes: usize) -> Vec<usize> {
        let lens = |queue: &VecDeque<Batch>| queue.iter().map(Vec::len).sum();
        batches(jobs, nodes).iter().map(lens).collect()
    }

    #[test]
    fn four_of_five_go_to_the_first_two() {
        assert_eq!(shares(4_000, 5), [1_600, 1_600, 267, 267, 266]);
        assert_eq!(shares(7, 5), [3, 3, 1, 0, 0]);
        assert_eq!(shares(100, 3), [40, 40, 20]);
        assert_eq!(shares(100, 2), [80, 20]);
        assert_eq!(shares(100, 1), [100]);
    }

    #[test]
    fn the_lease_is_three_seconds_and_longer_for_many_nodes() {
        assert_eq!([1, 5, 10, 11, 64].map(|nodes| lease(nodes).as_secs()), [3, 3, 3, 6, 21]);
    }

    #[test]
    fn every_job_is_given_once_in_bounded_requests() {
        let batches = batches(1_003, 5);
        let mut seqs: Vec<_> = batches.iter().flatten().flatten().copied().collect();
        seqs.sort_unstable();
        assert_eq!(seqs, (0..1_003).collect::<Vec<_>>());
        assert!(batches.iter().flatten().all(|batch| batch.len() <= BATCH_JOBS));
    }

    #[test]
    fn a_slow_link_needs_a_higher_threshold_and_more_at_once() {
        let on = |latency, nodes, work_ms| {
            let s = Stealing::on(latency, nodes, work_ms);
            (s.threshold, s.batch)
        };
        assert_eq!(on(false, 5, 20), (2, 16));
        assert_eq!(on(true, 5, 20), (66, 132));
        assert_eq!(on(true, 5, 0), (128, 256));
        assert_eq!(on(true, 5, 60_000), (2, 16));
    }
}
