//! The comparison with flexiq-mesh: every scenario on both sides, in one run.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::peer::Backlog;
use crate::scenario::{
    CONVERGE_LIMIT, CONVERGE_NODES, PERIOD, STEAL_JOBS, STEAL_NODES, STEAL_WINDOW,
};
use crate::{hash_ring, ours, peer};

const LOOKUP_NODES: usize = 100;
const CHANGE_NODES: usize = 1_000;

/// How to run the comparison.
#[derive(Args)]
pub(crate) struct Options {
    /// Print one JSON object as the last line of stdout, and the table to stderr.
    #[arg(long)]
    json: bool,
    /// Run the peer alone: its figures, and none of ours.
    #[arg(long)]
    peer_only: bool,
    /// How often each size of mesh is started on each side; the median counts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
}

/// Runs every scenario and prints what came of it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let comparison = Comparison {
        converge: CONVERGE_NODES
            .iter()
            .map(|&nodes| Converge::run(nodes, options))
            .collect::<Result<_>>()?,
        steal: Steal::run(options)?,
        hash_ring: HashRings::run(options.peer_only)?,
    };
    if options.json {
        eprint!("{comparison}");
        println!("{}", serde_json::to_string(&comparison)?);
    } else {
        print!("{comparison}");
    }
    Ok(())
}

/// Runs the hash rings alone and prints what came of it.
pub(crate) fn run_hash_ring(peer_only: bool) -> Result<()> {
    print!("{}", HashRings::run(peer_only)?);
    Ok(())
}

/// What the last line of stdout says. Figures of ours are left out when only the peer ran.
#[derive(Serialize)]
struct Comparison {
    converge: Vec<Converge>,
    steal: Steal,
    hash_ring: HashRings,
}

#[derive(Serialize)]
struct Converge {
    nodes: usize,
    /// The median, `null` where most rounds did not converge within the limit.
    peer_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ours_ms: Option<Option<u64>>,
    #[serde(skip)]
    peer_rounds: Vec<Option<Duration>>,
    #[serde(skip)]
    ours_rounds: Vec<Option<Duration>>,
}

impl Converge {
    fn run(nodes: usize, options: &Options) -> Result<Self> {
        let (mut peer_rounds, mut ours_rounds) = (Vec::new(), Vec::new());
        for round in 1..=options.rounds {
            eprintln!("{nodes} nodes, round {round} of {}", options.rounds);
            peer_rounds.push(peer::converge(nodes)?);
            if !options.peer_only {
                ours_rounds.push(ours::converge(nodes)?);
            }
        }
        Ok(Self {
            nodes,
            peer_ms: median_ms(&peer_rounds),
            ours_ms: (!options.peer_only).then(|| median_ms(&ours_rounds)),
            peer_rounds,
            ours_rounds,
        })
    }
}

#[derive(Serialize)]
struct Steal {
    peer_stolen: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ours_stolen: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ours_level_ms: Option<Option<u64>>,
    #[serde(skip)]
    peer_stolen_control: u64,
}

impl Steal {
    fn run(options: &Options) -> Result<Self> {
        eprintln!("stealing, the peer, what it gossips");
        let peer_stolen = peer::steal(Backlog::Gossiped)?;
        eprintln!("stealing, the peer, its thieves told the truth by hand");
        let peer_stolen_control = peer::steal(Backlog::WrittenByHand)?;
        let ours = if options.peer_only {
            None
        } else {
            eprintln!("stealing, ours");
            Some(ours::steal()?)
        };
        Ok(Self {
            peer_stolen,
            ours_stolen: ours.map(|outcome| outcome.stolen),
            ours_level_ms: ours.map(|outcome| outcome.level.map(millis)),
            peer_stolen_control,
        })
    }
}

#[derive(Serialize)]
struct HashRings {
    #[serde(skip_serializing_if = "Option::is_none")]
    lookup_ratio_100: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    change_ratio_1000: Option<f64>,
    /// The peer's, then ours.
    #[serde(skip)]
    lookup_ns: Vec<f64>,
    #[serde(skip)]
    change_ns: Vec<f64>,
}

impl HashRings {
    fn run(peer_only: bool) -> Result<Self> {
        eprintln!("hash ring, lookups at {LOOKUP_NODES} nodes");
        let lookup_ns = hash_ring::lookup_ns(&mut hash_ring::build(LOOKUP_NODES, peer_only)?);
        eprintln!("hash ring, changes at {CHANGE_NODES} nodes");
        let change_ns = hash_ring::change_ns(&mut hash_ring::build(CHANGE_NODES, peer_only)?);
        Ok(Self {
            lookup_ratio_100: ratio(&lookup_ns),
            change_ratio_1000: ratio(&change_ns),
            lookup_ns,
            change_ns,
        })
    }
}

/// The peer's time over ours, to two decimals.
fn ratio(sides: &[f64]) -> Option<f64> {
    match *sides {
        [peer, ours] => Some((peer / ours * 100.0).round() / 100.0),
        _ => None,
    }
}

/// The median, with a round that never converged above every one that did.
fn median_ms(rounds: &[Option<Duration>]) -> Option<u64> {
    let mut rounds: Vec<Duration> =
        rounds.iter().map(|round| round.unwrap_or(Duration::MAX)).collect();
    rounds.sort_unstable();
    let median = rounds[rounds.len() / 2];
    (median != Duration::MAX).then(|| millis(median))
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Nodes in one process on loopback, period {PERIOD:?}, one seed: until all see all, at most {CONVERGE_LIMIT:?}"
        )?;
        writeln!(f, "{:>7}  {:<44}  meshwork", "nodes", "flexiq-mesh 2.1.0")?;
        for size in &self.converge {
            writeln!(
                f,
                "{:>7}  {:<44}  {}",
                size.nodes,
                rounds_text(size.peer_ms, &size.peer_rounds),
                match size.ours_ms {
                    Some(ours_ms) => rounds_text(ours_ms, &size.ours_rounds),
                    None => "not run".to_owned(),
                }
            )?;
        }

        let Steal { peer_stolen, peer_stolen_control, .. } = self.steal;
        writeln!(
            f,
            "\n{STEAL_JOBS} jobs on one of {STEAL_NODES} nodes, the others stealing for {STEAL_WINDOW:?}: jobs stolen"
        )?;
        writeln!(
            f,
            "  flexiq-mesh 2.1.0  {peer_stolen} ({peer_stolen_control} once its thieves are told the backlog by hand)"
        )?;
        let ours = match (self.steal.ours_stolen, self.steal.ours_level_ms) {
            (Some(stolen), Some(Some(level_ms))) => format!("{stolen}, level after {level_ms} ms"),
            (Some(stolen), _) => format!("{stolen}, never level"),
            (None, _) => "not run".to_owned(),
        };
        writeln!(f, "  meshwork           {ours}")?;

        writeln!(f)?;
        self.hash_ring.fmt(f)
    }
}

impl fmt::Display for HashRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Hash ring, {} virtual nodes each, medians", hash_ring::VIRTUAL_NODES)?;
        sides(
            f,
            &format!("one lookup at {LOOKUP_NODES} nodes"),
            &self.lookup_ns,
            1.0,
            "ns",
            self.lookup_ratio_100,
        )?;
        sides(
            f,
            &format!("a join and a leave at {CHANGE_NODES} nodes"),
            &self.change_ns,
            1_000.0,
            "us",
            self.change_ratio_1000,
        )
    }
}

/// A median and the rounds that it is the median of.
fn rounds_text(median_ms: Option<u64>, rounds: &[Option<Duration>]) -> String {
    let each: Vec<String> = rounds
        .iter()
        .map(|round| round.map_or("never".to_owned(), |took| millis(took).to_string()))
        .collect();
    let median = median_ms.map_or("never".to_owned(), |ms| format!("{ms} ms"));
    format!("{median} ({})", each.join(", "))
}

fn sides(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    ns: &[f64],
    ns_per_unit: f64,
    unit: &str,
    ratio: Option<f64>,
) -> fmt::Result {
    write!(f, "  {what:<34}")?;
    for (name, ns) in ["flexiq-mesh", "meshwork"].iter().zip(ns) {
        write!(f, "  {name} {:.1} {unit}", ns / ns_per_unit)?;
    }
    match ratio {
        Some(ratio) => writeln!(f, "  ratio {ratio:.2}"),
        None => writeln!(f, "  meshwork not run"),
    }
}
