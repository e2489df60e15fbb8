//! Lookups in, and changes of, the two hash rings: rounds of both, interleaved, in one run.

use std::time::Instant;

use anyhow::Result;

/// Points of each node, the default of both sides.
pub(crate) const VIRTUAL_NODES: u32 = 150;

/// Rounds of each side. Odd, so that the median is a round that happened.
const ROUNDS: usize = 31;
/// Keys that every lookup round of either side asks for, the same ones in the same order.
const KEYS: usize = 8_192;
/// How often a lookup round asks for all of them.
const PASSES: u32 = 8;
/// Joins and leaves in a round of changes.
const CHANGES: u32 = 8;

/// What a hash ring is timed by. Each call is one batch, so that the call through the trait costs
/// nothing that counts.
pub(crate) trait Ring {
    /// Asks for the owner of every key.
    fn look_up(&self, keys: &[String]);

    /// Adds a node and removes it again, each visible to readers before the next step.
    fn join_and_leave(&mut self, newcomer: &str);
}

/// The names of `nodes` nodes, the same for both sides.
pub(crate) fn names(nodes: usize) -> Vec<String> {
    (0..nodes).map(|index| format!("node-{index:04}")).collect()
}

/// The median nanoseconds of one lookup, for each of `rings`.
pub(crate) fn lookup_ns(rings: &mut [Box<dyn Ring>]) -> Vec<f64> {
    let keys: Vec<String> = (0..KEYS).map(|i| format!("tenant-{}/object-{i}", i % 97)).collect();
    interleaved(rings, |ring| {
        for _ in 0..PASSES {
            ring.look_up(&keys);
        }
    })
    .into_iter()
    .map(|batch_ns| batch_ns / (KEYS as f64 * f64::from(PASSES)))
    .collect()
}

/// The median nanoseconds of one join and leave, for each of `rings`.
pub(crate) fn change_ns(rings: &mut [Box<dyn Ring>]) -> Vec<f64> {
    interleaved(rings, |ring| {
        for _ in 0..CHANGES {
            ring.join_and_leave("newcomer");
        }
    })
    .into_iter()
    .map(|batch_ns| batch_ns / f64::from(CHANGES))
    .collect()
}

/// Both rings of `nodes` nodes, or the peer's alone.
pub(crate) fn build(nodes: usize, peer_only: bool) -> Result<Vec<Box<dyn Ring>>> {
    let names = names(nodes);
    let mut rings: Vec<Box<dyn Ring>> = vec![Box::new(crate::peer::PeerRing::new(&names))];
    if !peer_only {
        rings.push(crate::ours::hash_ring(&names)?);
    }
    Ok(rings)
}

/// The median nanoseconds of `batch` on each ring.
///
/// Every round runs all rings, in turn first and last, so that no slow moment of the machine
/// favours one of them; and each timed batch follows an untimed one of the same ring, so that
/// neither pays for what the other left in the caches.
fn interleaved(rings: &mut [Box<dyn Ring>], batch: impl Fn(&mut dyn Ring)) -> Vec<f64> {
    let mut times = vec![Vec::with_capacity(ROUNDS); rings.len()];
    for round in 0..ROUNDS {
        let order: Vec<usize> = if round % 2 == 0 {
            (0..rings.len()).collect()
        } else {
            (0..rings.len()).rev().collect()
        };
        for side in order {
            batch(rings[side].as_mut());
            let started = Instant::now();
            batch(rings[side].as_mut());
            times[side].push(started.elapsed());
        }
    }
    times
        .into_iter()
        .map(|mut times| {
            times.sort_unstable();
            times[ROUNDS / 2].as_nanos() as f64
        })
        .collect()
}
