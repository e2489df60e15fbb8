//! The regions, and how far apart they are.

use std::time::Duration;

/// The regions of the demo, in the order in which nodes are started.
pub(crate) const REGIONS: [&str; 5] =
    ["us-east-1", "us-west-2", "eu-west-1", "ap-southeast-1", "sa-east-1"];

/// One-way latency in milliseconds from each region to each: half of the usual round trip between
/// the two over the public Internet, as the operators of such regions publish it. Within a region,
/// between two zones, half a millisecond rounds up to one.
const ONE_WAY_MS: [[u32; 5]; 5] = [
    //           us-east  us-west  eu-west  ap-south  sa-east
    /* us-east */
    [1, 33, 35, 110, 57],
    /* us-west */ [33, 1, 64, 82, 88],
    /* eu-west */ [35, 64, 1, 87, 89],
    /* ap-south */ [110, 82, 87, 1, 163],
    /* sa-east */ [57, 88, 89, 163, 1],
];

/// The name of node number `index`: its region, and from the sixth on a letter for its zone.
///
/// `index` is below 26 times the number of regions.
pub(crate) fn node_name(index: usize) -> String {
    let region = REGIONS[index % REGIONS.len()];
    let zone = u8::try_from(index / REGIONS.len()).expect("a demo has few nodes");
    if zone == 0 { region.into() } else { format!("{region}{}", char::from(b'a' + zone)) }
}

/// The one-way latency between two nodes by their names; none when either is in no known region.
pub(crate) fn one_way(from: &str, to: &str) -> Option<Duration> {
    let ms = ONE_WAY_MS[region_of(from)?][region_of(to)?];
    Some(Duration::from_millis(u64::from(ms)))
}

/// The longest round trip between any two of the first `nodes` nodes.
pub(crate) fn longest_round_trip(nodes: usize) -> Duration {
    let regions = nodes.min(REGIONS.len());
    let rows = ONE_WAY_MS.iter().take(regions);
    let longest = rows.flat_map(|row| row.iter().take(regions)).max().copied().unwrap_or(0);
    Duration::from_millis(2 * u64::from(longest))
}

fn region_of(node: &str) -> Option<usize> {
    REGIONS.iter().position(|region| {
        node.strip_prefix(region).is_some_and(|zone| {
            zone.is_empty() || (zone.len() == 1 && zone.bytes().all(|b| b.is_ascii_lowercase()))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_symmetric() {
        for (i, row) in ONE_WAY_MS.iter().enumerate() {
            for (j, ms) in row.iter().enumerate() {
                assert_eq!(*ms, ONE_WAY_MS[j][i]);
                assert_eq!(*ms == 1, i == j);
            }
        }
    }

    #[test]
    fn names_are_regions_then_zones() {
        assert_eq!(node_name(0), "us-east-1");
        assert_eq!(node_name(4), "sa-east-1");
        assert_eq!(node_name(5), "us-east-1b");
        assert_eq!(node_name(63), "ap-southeast-1m");
        let names: std::collections::BTreeSet<_> = (0..64).map(node_name).collect();
        assert_eq!(names.len(), 64);
    }

    #[test]
    fn latency_is_that_of_the_regions() {
        let ms = |from, to| one_way(from, to).map(|d| d.as_millis());
        assert_eq!(ms("us-east-1", "ap-southeast-1"), Some(110));
        assert_eq!(ms("sa-east-1c", "ap-southeast-1"), Some(163));
        assert_eq!(ms("us-east-1", "us-east-1b"), Some(1));
        assert_eq!(ms("us-east-1", "us-east-12"), None);
        assert_eq!(ms("mars", "us-east-1"), None);
        assert_eq!(longest_round_trip(2).as_millis(), 66);
        assert_eq!(longest_round_trip(64).as_millis(), 326);
        assert_eq!(longest_round_trip(1).as_millis(), 2);
    }
}
