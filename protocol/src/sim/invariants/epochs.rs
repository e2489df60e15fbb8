//! Epochs grow by one, and a subscriber that adds events up has the snapshot.

use std::collections::BTreeMap;

use crate::id::NodeId;
use crate::sim::invariants::Invariant;
use crate::sim::{HostIx, Output, Step};
use crate::swim::{Member, MembershipEvent};

/// A model subscriber of each host's boot.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    views: BTreeMap<HostIx, View>,
}

#[derive(Debug)]
struct View {
    boot: u64,
    epoch: u64,
    present: BTreeMap<NodeId, Member>,
}

impl Invariant for Epochs {
    fn name(&self) -> &'static str {
        "epochs grow by one and events add up to the snapshot"
    }

    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let is_event = |output: &Output| matches!(output, Output::Event(_));
        if !step.touched_the_table() && !step.outputs.iter().any(is_event) {
            return Ok(());
        }
        let host = &step.world.hosts()[step.host];
        let Some(machines) = &host.machines else { return Ok(()) };
        let MembershipEvent::Snapshot { epoch, members } = machines.swim.members().snapshot()
        else {
            return Err("a snapshot is a snapshot".into());
        };
        if self.views.get(&step.host).is_none_or(|view| view.boot != host.boot) {
            let present = members.iter().map(|m| (m.id.clone(), m.clone())).collect();
            self.views.insert(step.host, View { boot: host.boot, epoch, present });
            return Ok(());
        }
        let view = self.views.get_mut(&step.host).expect("it was just looked up");
        for output in step.outputs {
            let Output::Event(event) = output else { continue };
            if event.epoch() != view.epoch + 1 {
                return Err(format!("epoch {} after {}", event.epoch(), view.epoch));
            }
            view.epoch = event.epoch();
            let Some(member) = event.member() else { continue };
            let known = view.present.get(&member.id);
            let (was, is) = match event {
                MembershipEvent::Joined { .. } => (false, true),
                MembershipEvent::Died { .. } | MembershipEvent::Left { .. } => (true, false),
                _ => (true, true),
            };
            if known.is_some() != was || member.is_present() != is {
                return Err(format!("{event:?} while {known:?} was known"));
            }
            if is {
                view.present.insert(member.id.clone(), member.clone());
            } else {
                view.present.remove(&member.id);
            }
        }
        // Incarnations move without an event: subscribers have no use for them.
        let seen = |m: &Member| (m.id.clone(), m.boot(), m.state, m.steal);
        let added_up: Vec<_> = view.present.values().map(seen).collect();
        let snapshot: Vec<_> = members.iter().map(seen).collect();
        if (view.epoch, &added_up) != (epoch, &snapshot) {
            return Err(format!("events give {added_up:?}, the snapshot {snapshot:?}"));
        }
        Ok(())
    }
}
