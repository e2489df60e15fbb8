//! Only a node raises its own record: nobody knows a higher incarnation of a running boot than it
//! has itself, and nobody calls a boot departed that was not told to leave.

use crate::sim::Step;
use crate::sim::invariants::Invariant;
use crate::swim::MemberState;

#[derive(Debug)]
pub(super) struct OwnRecord;

impl Invariant for OwnRecord {
    fn name(&self) -> &'static str {
        "only a node raises its own record"
    }

    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        if !step.touched_the_table() {
            return Ok(());
        }
        let hosts = step.world.hosts();
        let Some(machines) = &hosts[step.host].machines else { return Ok(()) };
        for known in machines.swim.members().table() {
            for host in hosts.iter().filter(|host| host.id == known.id) {
                let Some(machines) = &host.machines else { continue };
                let own = machines.swim.members().me();
                if own.boot() != known.boot() {
                    continue;
                }
                if known.incarnation > own.incarnation {
                    return Err(format!("{known:?} is known, its own record is {own:?}"));
                }
                if known.state == MemberState::Left && !host.leaving {
                    return Err(format!("{known:?} never left"));
                }
            }
        }
        Ok(())
    }
}
