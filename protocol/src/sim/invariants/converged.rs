//! Every table converges on who is really there.

use std::collections::BTreeMap;

use crate::id::{Incarnation, NodeId};
use crate::sim::World;
use crate::swim::{Boot, MemberState};

type Present = BTreeMap<NodeId, (Boot, Incarnation, MemberState)>;

/// Who is really there: the running nodes that were not told to leave, as they see themselves.
fn present(world: &World) -> Present {
    let up = world.hosts().iter().filter(|host| host.machines.is_some() && !host.leaving);
    up.map(|host| (host.id.clone(), host.me().precedence())).collect()
}

/// Whether every running node sees exactly who is there, all alive, and has nothing against anyone.
///
/// # Errors
/// The first difference, in words.
pub fn converged(world: &World) -> Result<(), String> {
    let truth = present(world);
    for host in world.hosts().iter().filter(|host| host.machines.is_some() && !host.leaving) {
        let table = host.members().table().filter(|member| member.is_present());
        let seen: Present = table.map(|m| (m.id.clone(), m.precedence())).collect();
        if seen != truth {
            let missing: Vec<_> = truth.iter().filter(|(id, r)| seen.get(id) != Some(r)).collect();
            let surplus: Vec<_> = seen.iter().filter(|(id, r)| truth.get(id) != Some(r)).collect();
            return Err(format!("{} lacks {missing:?} and has {surplus:?}", host.id));
        }
    }
    Ok(())
}
