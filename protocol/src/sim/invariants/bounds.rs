//! Datagrams stay in budget and queues stay bounded.

use crate::limits::{DATAGRAM_BODY_BYTES_MAX, MEMBERS_MAX, RELAYS_MAX};
use crate::sim::invariants::Invariant;
use crate::sim::{Output, Step};

#[derive(Debug)]
pub(super) struct Bounds;

impl Invariant for Bounds {
    fn name(&self) -> &'static str {
        "datagrams stay in budget and queues bounded"
    }

    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for output in step.outputs {
            if let Output::Datagram(_, message) = output
                && message.len() > DATAGRAM_BODY_BYTES_MAX
            {
                return Err(format!("a message of {} bytes", message.len()));
            }
        }
        if !step.touched_the_table() {
            return Ok(());
        }
        let Some(machines) = &step.world.hosts()[step.host].machines else { return Ok(()) };
        let (detector, members) = (machines.swim.detector(), machines.swim.members());
        let known = members.table().count();
        for (what, size, bound) in [
            ("member table", known, MEMBERS_MAX),
            ("dissemination queue", detector.queued_updates(), MEMBERS_MAX),
            ("relays", detector.open_relays(), RELAYS_MAX),
            ("dials", members.open_dials(), crate::swim::members::DIALS_MAX),
        ] {
            if size > bound {
                return Err(format!("{what}: {size}, the bound is {bound}"));
            }
        }
        Ok(())
    }
}
