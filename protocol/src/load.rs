//! The load vector: what a node says of its own backlog. The newest version wins, and its age is
//! known. It rides in pings and acks, outside the membership updates, and never depends on an
//! incarnation.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{Generation, NodeId};
use crate::limits::MEMBERS_MAX;
use crate::time::Instant;

/// What a node has to do and can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Grows with each change within a generation.
    pub version: u64,
    /// Jobs in the deque that a thief could get.
    pub stealable: u32,
    /// Jobs in the deque.
    pub queued: u32,
    /// Jobs that run now, or have been handed to an executor to run next.
    pub running: u32,
    /// Jobs that can run at once.
    pub slots: u32,
    /// Smoothed time that one job holds a slot, in microseconds; 0 while none has run.
    pub service_us: u32,
}

impl Load {
    /// How many jobs `self` would have to give to `thief` so that both have the same work for each
    /// of their slots: queued and running, less the slots. 0 when the thief is no better off.
    ///
    /// Rounded down, and so a fixed point is reached: of two nodes of which each would call itself
    /// idle, neither takes from the other what the other would take back.
    pub fn surplus_over(&self, thief: &Self) -> u32 {
        let (mine, theirs) = (i128::from(self.slots.max(1)), i128::from(thief.slots));
        let excess = |load: &Self| {
            i128::from(load.queued) + i128::from(load.running) - i128::from(load.slots)
        };
        let surplus = (excess(self) * theirs - excess(thief) * mine) / (mine + theirs);
        u32::try_from(surplus.max(0)).unwrap_or(u32::MAX)
    }
}

/// A node's load as it is told to others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Whose.
    pub node: NodeId,
    /// Of which boot.
    pub generation: Generation,
    /// What it said.
    pub load: Load,
    /// How old it was when this report was sent, in milliseconds.
    pub age_ms: u32,
}

/// The newest known load of each node.
#[derive(Clone, Debug, Default)]
pub struct LoadTable {
    rows: HashMap<NodeId, Row>,
}

#[derive(Clone, Debug)]
struct Row {
    generation: Generation,
    load: Load,
    measured: Instant,
}

impl LoadTable {
    /// Takes in a report; returns whether it was news.
    pub fn observe(&mut self, now: Instant, report: &LoadReport) -> bool {
        let measured = now - Duration::from_millis(u64::from(report.age_ms));
        let newest = (report.generation, report.load.version);
        let known = self.rows.get(&report.node).map(|r| (r.generation, r.load.version));
        if known.is_some_and(|known| known >= newest)
            || (known.is_none() && self.rows.len() >= MEMBERS_MAX)
        {
            return false;
        }
        let row = Row { generation: report.generation, load: report.load, measured };
        self.rows.insert(report.node.clone(), row);
        true
    }

    /// Forgets a node.
    pub fn remove(&mut self, node: &NodeId) {
        self.rows.remove(node);
    }

    /// The newest load of `node`, and how old it is.
    pub fn load_of(&self, now: Instant, node: &NodeId) -> Option<(Load, Duration)> {
        self.rows.get(node).map(|r| (r.load, now.saturating_since(r.measured)))
    }

    /// The report to pass on about `node`.
    pub fn report_of(&self, now: Instant, node: &NodeId) -> Option<LoadReport> {
        self.rows.get(node).map(|r| LoadReport {
            node: node.clone(),
            generation: r.generation,
            load: r.load,
            age_ms: u32::try_from(now.saturating_since(r.measured).as_millis()).unwrap_or(u32::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(generation: u64, version: u64, queued: u32) -> LoadReport {
        let load = Load { version, queued, ..Load::default() };
        let node = NodeId::new("a").unwrap();
        LoadReport { node, generation: Generation(generation), load, age_ms: 100 }
    }

    fn busy(queued: u32, running: u32, slots: u32) -> Load {
        Load { queued, running, slots, ..Load::default() }
    }

    #[test]
    fn surplus_evens_out_the_work_of_each_slot_and_stops_there() {
        let idle = busy(0, 0, 4);
        assert_eq!(busy(60, 4, 4).surplus_over(&idle), 32, "the thief's free slots count");
        assert_eq!(
            busy(1, 4, 4).surplus_over(&idle),
            2,
            "more than it has: the deque knows better"
        );
        assert_eq!(busy(0, 4, 4).surplus_over(&busy(0, 4, 4)), 0);
        assert_eq!(busy(3, 2, 2).surplus_over(&busy(2, 2, 2)), 0, "a job less is no reason");
        assert_eq!(busy(4, 2, 2).surplus_over(&busy(2, 2, 2)), 1);
        assert_eq!(busy(2, 2, 2).surplus_over(&busy(4, 2, 2)), 0, "never from the poorer");
        assert_eq!(
            busy(30, 1, 1).surplus_over(&busy(0, 0, 3)),
            23,
            "three slots take three shares"
        );
        assert_eq!(busy(30, 1, 1).surplus_over(&busy(0, 0, 0)), 0, "no slot, no share");
        assert_eq!(busy(u32::MAX, u32::MAX, 0).surplus_over(&busy(0, 0, u32::MAX)), u32::MAX);
    }

    #[test]
    fn the_newest_version_of_the_newest_generation_wins_and_ages() {
        let a = NodeId::new("a").unwrap();
        let now = Instant::from_micros(1_000_000);
        let mut table = LoadTable::default();
        assert!(table.observe(now, &report(1, 5, 50)));
        assert!(!table.observe(now, &report(1, 5, 51)), "the same version is no news");
        assert!(!table.observe(now, &report(1, 4, 40)), "an older version is no news");
        assert!(table.observe(now, &report(2, 0, 7)), "a new boot starts its versions again");
        let (load, age) = table.load_of(now + Duration::from_millis(20), &a).unwrap();
        assert_eq!((load.queued, age), (7, Duration::from_millis(120)));
        table.remove(&a);
        assert_eq!(table.load_of(now, &a), None);
    }
}
