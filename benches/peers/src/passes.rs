//! The comparison of passes with subetha-cxc and with `sync_channel`: every scenario on all sides,
//! paired, in one run.

mod channel;
#[path = "../../passes/common/mod.rs"]
mod common;
mod ours;
mod peer;
mod scan;
mod worker;

use std::fmt;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use self::channel::{Channel, Payload};
use self::common::floors::Floors;
use self::common::scenario::{self, IN_FLIGHT};
use self::common::{echo, median};
use self::ours::Ours;
use self::peer::Peer;
use self::scan::Occupied;
pub(crate) use self::worker::{Options as WorkerOptions, run as run_worker};

/// How to run the comparison.
#[derive(Args)]
pub(crate) struct Options {
    /// Print one JSON object as the last line of stdout, and the table to stderr.
    #[arg(long)]
    json: bool,
    /// How often each side is measured; the median of the pairs counts.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u8).range(1..))]
    pairs: u8,
}

/// Runs every scenario and prints what came of it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let comparison = Comparison::run(options.pairs)?;
    if options.json {
        eprint!("{comparison}");
        println!("{}", serde_json::to_string(&Ratios::of(&comparison))?);
    } else {
        print!("{comparison}");
    }
    Ok(())
}

/// What the last line of stdout says. Throughput is ours over theirs, the rest our time over theirs:
/// medians of the pairs' ratios.
#[derive(Serialize)]
struct Ratios {
    pairs: u8,
    throughput_ratio: f64,
    throughput_ratio_min: f64,
    submit_ratio_peer: f64,
    submit_ratio_channel: f64,
    rtt_idle_ratio: f64,
    scan_8_ratio: f64,
    scan_64_ratio: f64,
}

impl Ratios {
    fn of(comparison: &Comparison) -> Self {
        let throughput = comparison.throughput.ratios();
        Self {
            pairs: comparison.pairs,
            throughput_ratio: round(median(throughput.iter().copied())),
            throughput_ratio_min: round(throughput.into_iter().fold(f64::INFINITY, f64::min)),
            submit_ratio_peer: round(comparison.submit.ratio_to_peer()),
            submit_ratio_channel: round(comparison.submit.ratio_to_channel()),
            rtt_idle_ratio: round(comparison.rtt_idle.ratio()),
            scan_8_ratio: round(comparison.scans[0].ratio()),
            scan_64_ratio: round(comparison.scans[1].ratio()),
        }
    }
}

fn round(ratio: f64) -> f64 {
    (ratio * 1_000.0).round() / 1_000.0
}

/// Measurements of each floor; the median counts.
const FLOORS: usize = 9;

struct Comparison {
    pairs: u8,
    floors: Floors,
    throughput: Pairs,
    submit: Submit,
    rtt_idle: Pairs,
    scans: [Scan; 2],
}

impl Comparison {
    fn run(pairs: u8) -> Result<Self> {
        eprintln!("floors");
        let floors = Floors::medians(&(0..FLOORS).map(|_| Floors::measure()).collect::<Vec<_>>());
        Ok(Self {
            pairs,
            floors,
            throughput: Pairs::run(pairs, "throughput", |side| match side {
                Side::Ours => Ok(scenario::throughput_per_s(&mut Ours::open(Place::Process)?)),
                Side::Peer => Ok(scenario::throughput_per_s(&mut Peer::open(Place::Process)?)),
            })?,
            submit: Submit::run(pairs)?,
            rtt_idle: Pairs::run(pairs, "round trip after 5 ms idle", |side| match side {
                Side::Ours => Ok(scenario::rtt_idle_ns(&mut Ours::open(Place::Process)?)),
                Side::Peer => Ok(scenario::rtt_idle_ns(&mut Peer::open(Place::Process)?)),
            })?,
            scans: [Scan::run(pairs, 8)?, Scan::run(pairs, 64)?],
        })
    }
}

/// Where the worker runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Process,
    Thread,
}

#[derive(Clone, Copy)]
enum Side {
    Ours,
    Peer,
}

/// What each side came to in each pair.
struct Pairs {
    ours: Vec<f64>,
    peer: Vec<f64>,
}

impl Pairs {
    /// Measures both sides `pairs` times; who is first alternates.
    fn run(pairs: u8, what: &str, mut measure: impl FnMut(Side) -> Result<f64>) -> Result<Self> {
        let (mut ours, mut peer) = (Vec::new(), Vec::new());
        for pair in 1..=pairs {
            eprintln!("{what}, pair {pair} of {pairs}");
            let order = [Side::Ours, Side::Peer];
            for turn in 0..2 {
                match order[(turn + usize::from(pair)) % 2] {
                    Side::Ours => ours.push(measure(Side::Ours)?),
                    Side::Peer => peer.push(measure(Side::Peer)?),
                }
            }
        }
        Ok(Self { ours, peer })
    }

    /// Ours over theirs, pair by pair.
    fn ratios(&self) -> Vec<f64> {
        ratios(&self.ours, &self.peer)
    }

    fn ratio(&self) -> f64 {
        median(self.ratios())
    }
}

fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

/// One way to submit, round by round, in nanoseconds for each accepted pass.
struct Submitter {
    name: &'static str,
    burst: Vec<f64>,
    sustained: Vec<f64>,
}

/// Submitting while a worker drains, by each of [`SUBMITTERS`].
struct Submit(Vec<Submitter>);

/// One measurement on a fresh side.
type SubmitOnce = fn() -> Result<scenario::SubmitNs>;

/// Who submits: ours and the peer in both arrangements, the channel with both payloads.
const SUBMITTERS: [(&str, SubmitOnce); 6] = [
    ("meshwork, worker process", || Ok(scenario::submit_ns(&mut Ours::open(Place::Process)?))),
    ("meshwork, worker thread", || Ok(scenario::submit_ns(&mut Ours::open(Place::Thread)?))),
    ("subetha-cxc, worker process", || Ok(scenario::submit_ns(&mut Peer::open(Place::Process)?))),
    ("subetha-cxc, worker thread", || Ok(scenario::submit_ns(&mut Peer::open(Place::Thread)?))),
    ("sync_channel, Vec<u8>", || Ok(scenario::submit_ns(&mut Channel::open(Payload::Vec)?))),
    ("sync_channel, [u8; 48]", || Ok(scenario::submit_ns(&mut Channel::open(Payload::Array)?))),
];

impl Submit {
    fn run(rounds: u8) -> Result<Self> {
        let mut submitters: Vec<Submitter> = SUBMITTERS
            .iter()
            .map(|&(name, _)| Submitter { name, burst: Vec::new(), sustained: Vec::new() })
            .collect();
        for round in 1..=rounds {
            eprintln!("submit while a worker drains, round {round} of {rounds}");
            for turn in 0..SUBMITTERS.len() {
                let index = (turn + usize::from(round)) % SUBMITTERS.len();
                let ns = SUBMITTERS[index].1()?;
                submitters[index].burst.push(ns.burst);
                submitters[index].sustained.push(ns.sustained);
            }
        }
        Ok(Self(submitters))
    }

    /// Ours across processes, against the peer's faster arrangement.
    fn ratio_to_peer(&self) -> f64 {
        self.ratio_to(&self.0[2..4])
    }

    /// Ours across processes, against the channel that takes arguments of any length, as ours does.
    fn ratio_to_channel(&self) -> f64 {
        self.ratio_to(&self.0[4..5])
    }

    fn ratio_to(&self, others: &[Submitter]) -> f64 {
        let ours = &self.0[0];
        others.iter().map(|other| median(ratios(&ours.burst, &other.burst))).fold(0.0, f64::max)
    }
}

/// A watchdog's scan of one size, with every row taken and with one.
struct Scan {
    slots: usize,
    all: Pairs,
    one: Pairs,
}

impl Scan {
    fn run(pairs: u8, slots: usize) -> Result<Self> {
        let run = |occupied| {
            Pairs::run(pairs, &format!("scan of {slots}, {occupied}"), |side| match side {
                Side::Ours => Ok(scan::ours_ns(slots, occupied)),
                Side::Peer => scan::peer_ns(slots, occupied),
            })
        };
        Ok(Self { slots, all: run(Occupied::All)?, one: run(Occupied::One)? })
    }

    /// The worse of the two.
    fn ratio(&self) -> f64 {
        self.all.ratio().max(self.one.ratio())
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Floors { line_rtt_ns, wake_nobody_ns, wake_to_run_ns, clock_ns } = self.floors;
        writeln!(f, "Floors of this run")?;
        writeln!(f, "  cache line, round trip between two threads  {line_rtt_ns:.1} ns")?;
        writeln!(f, "  futex wake, nobody waits                    {wake_nobody_ns:.0} ns")?;
        writeln!(
            f,
            "  futex wake to run after 5 ms idle           {:.1} us",
            wake_to_run_ns / 1e3
        )?;
        writeln!(f, "  reading CLOCK_MONOTONIC_COARSE              {clock_ns:.1} ns")?;

        writeln!(
            f,
            "\nPasses, {} pairs, medians; arguments of {} bytes (the peer {}, which is all it takes)",
            self.pairs,
            echo::ARG_BYTES,
            peer::ARG_BYTES
        )?;
        writeln!(f, "cross-process, {IN_FLIGHT} in flight: million passes a second")?;
        self.throughput.write(f, 1e6, "M/s")?;
        writeln!(f, "cross-process, round trip after 5 ms idle, p50 (adaptive worker)")?;
        self.rtt_idle.write(f, 1e3, "us")?;

        writeln!(f, "submit while a worker drains: ns an accepted pass")?;
        writeln!(f, "  {:<28} {:>22} {:>24}", "", "submit, room made", "and collect, no pause")?;
        for submitter in &self.submit.0 {
            writeln!(
                f,
                "  {:<28} {:>22.1} {:>24.1}",
                submitter.name,
                median(submitter.burst.iter().copied()),
                median(submitter.sustained.iter().copied())
            )?;
        }
        writeln!(
            f,
            "  submit, room made, ours across processes over: the faster peer {:.3}, Vec<u8> channel {:.3}, [u8; 48] channel {:.3}",
            self.submit.ratio_to_peer(),
            self.submit.ratio_to_channel(),
            self.submit.ratio_to(&self.submit.0[5..])
        )?;

        for scan in &self.scans {
            for (pairs, occupied) in [(&scan.all, Occupied::All), (&scan.one, Occupied::One)] {
                writeln!(f, "watchdog scan of {} slots, {occupied}", scan.slots)?;
                pairs.write(f, 1.0, "ns")?;
            }
        }
        Ok(())
    }
}

impl Pairs {
    fn write(&self, f: &mut fmt::Formatter<'_>, per_unit: f64, unit: &str) -> fmt::Result {
        let ratios = self.ratios();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        writeln!(
            f,
            "  meshwork {:.2} {unit}  subetha-cxc {:.2} {unit}  ratio {:.3} ({least:.3} to {most:.3})",
            median(self.ours.iter().copied()) / per_unit,
            median(self.peer.iter().copied()) / per_unit,
            median(ratios)
        )
    }
}
