//! A healthy member that was never paused or cut off is not declared dead by one that was not
//! either.

use crate::sim::invariants::Invariant;
use crate::sim::{Output, Step};
use crate::swim::MembershipEvent;

#[derive(Debug)]
pub(super) struct NoFalseDeath;

impl Invariant for NoFalseDeath {
    fn name(&self) -> &'static str {
        "a healthy member is not declared dead"
    }

    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let hosts = step.world.hosts();
        if hosts[step.host].disturbed || step.world.false_deaths_allowed() {
            return Ok(());
        }
        for output in step.outputs {
            let Output::Event(MembershipEvent::Died { member, .. }) = output else { continue };
            let lives = hosts.iter().any(|host| {
                !host.disturbed
                    && host.machines.as_ref().is_some_and(|machines| {
                        machines.swim.members().me().id == member.id
                            && machines.swim.members().me().boot() == member.boot()
                    })
            });
            if lives {
                return Err(format!("{member:?} lives"));
            }
        }
        Ok(())
    }
}
