//! No table takes a record back: precedence only grows, for as long as an id is remembered.

use std::collections::BTreeMap;

use crate::id::{Incarnation, NodeId};
use crate::sim::invariants::Invariant;
use crate::sim::{HostIx, Step};
use crate::swim::{Boot, MemberState};

type Rank = (Boot, Incarnation, MemberState);

#[derive(Debug, Default)]
pub(super) struct Precedence {
    seen: BTreeMap<HostIx, (u64, BTreeMap<NodeId, Rank>)>,
}

impl Invariant for Precedence {
    fn name(&self) -> &'static str {
        "precedence only grows"
    }

    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        if !step.touched_the_table() {
            return Ok(());
        }
        let host = &step.world.hosts()[step.host];
        let Some(machines) = &host.machines else { return Ok(()) };
        let now: BTreeMap<NodeId, Rank> = machines
            .swim
            .members()
            .table()
            .map(|member| (member.id.clone(), member.precedence()))
            .collect();
        let before = self.seen.insert(step.host, (host.boot, now));
        let Some((boot, before)) = before.filter(|(boot, _)| *boot == host.boot) else {
            return Ok(());
        };
        let (_, now) = &self.seen[&step.host];
        for (id, rank) in now {
            if before.get(id).is_some_and(|before| before > rank) {
                return Err(format!("{id} went from {:?} to {rank:?} in boot {boot}", before[id]));
            }
        }
        Ok(())
    }
}
