//! Membership proven on virtual time: scenarios over many seeds, each step held to the invariants.

use std::time::Duration;

use meshwork_protocol::sim::invariants::converged;
use meshwork_protocol::sim::{Faults, World, for_seeds};
use meshwork_protocol::swim::SwimConfig;

fn fast() -> SwimConfig {
    SwimConfig { protocol_period: Duration::from_millis(100), ..SwimConfig::default() }
}

#[test]
fn meshes_of_5_16_and_64_see_all_within_two_seconds() {
    for nodes in [5, 16, 64] {
        let mut times = Vec::new();
        for_seeds(8, |seed| {
            let mut world = World::mesh(seed, fast(), Faults::none(), nodes);
            let took = world.run_until(Duration::from_secs(2), |w| converged(w).is_ok());
            times.push(took.unwrap_or_else(|| panic!("{nodes}: {:?}", converged(&world))));
        });
        times.sort();
        println!("{nodes} nodes: {times:?}");
    }
}
