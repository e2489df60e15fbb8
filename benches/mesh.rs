//! How fast do nodes find each other, how soon does idle capacity get work, how well is it used?
//!
//! `cargo bench --bench mesh [-- --json]`. Progress goes to stderr, the table to stdout; with
//! `--json` the last line of stdout is one object.

use std::process::Command;
use std::time::{Duration, Instant};

use actix::Arbiter;
use futures_util::StreamExt;
use futures_util::future::join_all;
use meshwork::actors::start::{Deaths, Running, Slot};
use meshwork::actors::store::memory::MemoryStore;
use meshwork::actors::store::messages::StoreHandle;
use meshwork::prelude::*;
use meshwork::{Followed, JobEvent};
use serde::{Deserialize, Serialize};

/// Nodes of the convergence runs.
const NODES: usize = 64;
/// Runs of it.
const CONVERGENCE_RUNS: usize = 10;
/// A run that takes longer has failed.
const CONVERGENCE_LIMIT: Duration = Duration::from_secs(12);
/// Bursts of the first-steal runs.
const BURSTS: usize = 21;
/// Demo runs of each kind.
const DEMO_RUNS: usize = 3;

#[derive(Serialize, Deserialize)]
struct Nap {
    us: u64,
}

impl Job for Nap {
    const NAME: &'static str = "nap";
    type Output = ();
}

async fn nap(Nap { us }: Nap) -> Result<(), JobError> {
    tokio::time::sleep(Duration::from_micros(us)).await;
    Ok(())
}

#[derive(Serialize)]
struct Report {
    nodes_64_runs: usize,
    nodes_64_converged: usize,
    nodes_64_ms: f64,
    first_steal_ms: f64,
    efficiency: f64,
    efficiency_no_latency: f64,
    efficiency_no_steal: f64,
    datagram_bytes_max: u64,
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let (times, datagram_bytes_max) = actix::System::new().block_on(convergence());
    let bursts = actix::System::new().block_on(first_steals());
    let report = Report {
        nodes_64_runs: CONVERGENCE_RUNS,
        nodes_64_converged: times.len(),
        nodes_64_ms: median(times),
        first_steal_ms: median(bursts),
        efficiency: demo(&[]),
        efficiency_no_latency: demo(&["--no-latency"]),
        efficiency_no_steal: demo(&["--no-steal"]),
        datagram_bytes_max,
    };
    if json {
        println!("{}", serde_json::to_string(&report).expect("numbers are JSON"));
        return;
    }
    println!("64 nodes in one process, 100 ms period, one seed: all see all");
    println!(
        "  converged                  {} of {}",
        report.nodes_64_converged, report.nodes_64_runs
    );
    println!("  median                     {:.0} ms (at most 2000)", report.nodes_64_ms);
    println!("  largest datagram           {} bytes (at most 1400)", report.datagram_bytes_max);
    println!("burst on one of five idle nodes, loopback");
    println!("  first stolen job starts    {:.1} ms (at most 10)", report.first_steal_ms);
    println!("demo, 4000 jobs of 20 ms, five nodes of 4 slots: share of the slots' time in use");
    println!("  emulated latency           {:.2} (at least 0.80)", report.efficiency);
    println!("  no latency                 {:.2} (at least 0.90)", report.efficiency_no_latency);
    println!("  no stealing, latency       {:.2}", report.efficiency_no_steal);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A store in memory for all nodes of a run.
fn shared_store(on: &Arbiter) -> (Store, Running) {
    let (deaths, _) = Deaths::new();
    let slot = Slot::<MemoryStore>::new("MemoryStore", 4_096);
    let handle = StoreHandle::of(&slot.addr());
    let running = slot.start(&on.handle(), &deaths, |_| MemoryStore::default());
    (Store::shared(handle), running)
}

/// Milliseconds from the start of the other 63 until everyone sees everyone, for each run that got
/// there; and the largest datagram of all runs.
async fn convergence() -> (Vec<f64>, u64) {
    let (mut times, mut datagram_bytes_max) = (Vec::new(), 0);
    for run in 1..=CONVERGENCE_RUNS {
        let (control, work) = (Arbiter::new(), Arbiter::new());
        let (store, running) = shared_store(&work);
        let placement = Placement::default()
            .control(control.handle())
            .work(work.handle())
            .tenant(work.handle())
            .store(work.handle());
        let node = |n: usize| {
            Mesh::builder(format!("node-{n}"))
                .store(store.clone())
                .placement(placement.clone())
                .protocol_period(Duration::from_millis(100))
                .slots(1)
                .job(nap)
        };
        let seed = node(0).start().await.expect("the seed starts");
        let begin = Instant::now();
        let seed_addr = seed.gossip_addr().to_string();
        let starts = (1..NODES).map(|n| node(n).seed(seed_addr.clone()).start());
        let mut nodes: Vec<Mesh> =
            join_all(starts).await.into_iter().map(|n| n.expect("a node starts")).collect();
        nodes.push(seed);
        let everyone = join_all(nodes.iter().map(sees_all));
        match tokio::time::timeout(CONVERGENCE_LIMIT, everyone).await {
            Ok(_) => {
                let ms = begin.elapsed().as_secs_f64() * 1_000.0;
                eprintln!("convergence {run} of {CONVERGENCE_RUNS}: {ms:.0} ms");
                times.push(ms);
            }
            Err(_) => {
                eprintln!("convergence {run} of {CONVERGENCE_RUNS}: not in {CONVERGENCE_LIMIT:?}");
            }
        }
        for node in &nodes {
            datagram_bytes_max = datagram_bytes_max.max(node.metrics().datagram_bytes_max);
        }
        join_all(nodes.iter().map(|node| node.drain(Duration::from_secs(1)))).await;
        running.stop().await;
        control.stop();
        work.stop();
    }
    (times, datagram_bytes_max)
}

async fn sees_all(node: &Mesh) {
    let mut events = node.events();
    while node.members().present().count() < NODES {
        if events.next().await.is_none() {
            return;
        }
    }
}

/// Milliseconds from sending a burst to one of five idle nodes until a stolen job starts on another.
async fn first_steals() -> Vec<f64> {
    let store_arbiter = Arbiter::new();
    let (store, running) = shared_store(&store_arbiter);
    let mut nodes: Vec<Mesh> = Vec::new();
    for n in 0..5 {
        let seeds = nodes.first().map(|seed| seed.gossip_addr().to_string());
        let builder = Mesh::builder(format!("node-{n}")).store(store.clone()).slots(4).job(nap);
        nodes.push(builder.seeds(seeds).start().await.expect("a node starts"));
    }
    let mut times = Vec::new();
    for burst in 0..BURSTS {
        // All idle, and their lifelines registered.
        tokio::time::sleep(Duration::from_millis(700)).await;
        let busy = &nodes[burst % nodes.len()];
        let others = nodes.iter().filter(|node| node.id() != busy.id());
        let mut events =
            futures_util::stream::select_all(others.map(|node| node.job_events(1_024)));
        let jobs: Vec<_> = (0..60)
            .map(|_| Enqueue::new(&Nap { us: 20_000 }).into_request().expect("a nap is a job"))
            .collect();
        let begin = Instant::now();
        let accepted = busy.enqueue_batch(jobs).await.expect("the burst is accepted");
        let first = async {
            while let Some(event) = events.next().await {
                if let Followed::Event(JobEvent::Started { stolen: true, .. }) = event {
                    return;
                }
            }
        };
        if tokio::time::timeout(Duration::from_secs(5), first).await.is_ok() {
            times.push(begin.elapsed().as_secs_f64() * 1_000.0);
        }
        for accepted in accepted {
            busy.outcome(&Ticket::<Nap>::of(accepted.id)).await;
        }
    }
    eprintln!("first steals: {times:.1?} ms");
    join_all(nodes.iter().map(|node| node.drain(Duration::from_secs(1)))).await;
    running.stop().await;
    times
}

/// The median efficiency that the demo reports.
fn demo(flags: &[&str]) -> f64 {
    let runs = (0..DEMO_RUNS).map(|_| {
        let output = Command::new(env!("CARGO_BIN_EXE_meshwork"))
            .args(["demo", "--headless", "--json"])
            .args(flags)
            .output()
            .expect("the demo runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or_default();
        let value: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
        let efficiency = value["efficiency"].as_f64().unwrap_or(f64::NAN);
        eprintln!("demo {flags:?}: efficiency {efficiency:.3}, verified {}", value["verified"]);
        efficiency
    });
    median(runs.collect())
}
