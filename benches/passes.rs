//! What does a pass cost, what does a worker cost that has none, how soon does another take over?
//!
//! `cargo bench --bench passes [-- --json]`. Progress goes to stderr, the table to stdout; with
//! `--json` the last line of stdout is one object. Workers are processes: this program, run again.

#[path = "passes/actors.rs"]
mod actors;
#[path = "passes/common/mod.rs"]
mod common;
#[path = "passes/copy.rs"]
mod copy;
#[path = "passes/failover.rs"]
mod failover;
#[path = "passes/latency.rs"]
mod latency;
#[path = "passes/worker.rs"]
mod worker;

use meshwork::passes::Spin;
use serde::Serialize;

use self::actors::Actors;
use self::common::floors::Floors;
use self::common::median;
use self::common::scan::scan_ns;
use self::common::scenario;
use self::latency::Bench;

/// Measurements of each figure; the median counts.
const ROUNDS: usize = 9;

#[derive(Serialize)]
struct Report {
    /// Of the passes that were submitted, the share that came back as they should.
    accepted: f64,
    throughput_per_s: f64,
    submit_ns: f64,
    rtt_idle_sleep_us: f64,
    rtt_idle_spin_ns: f64,
    rtt_depth1_ns: f64,
    line_rtt_ns: f64,
    futex_wake_us: f64,
    idle_cpu_percent: f64,
    scan_8_ns: f64,
    scan_64_ns: f64,
    actor_submit_over_floor: f64,
    actor_batch_per_s: f64,
    failover_ms: f64,
    copy_ratio_64k: f64,
}

/// What only the table says.
struct Beside {
    floors: Floors,
    sustained_ns: f64,
    failovers: usize,
    actor_floor_ns: f64,
    actor_submit_ns: f64,
    copies_per_s: f64,
    passes_64k_per_s: f64,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(worker) = worker::Role::parse(&args) {
        return worker.run();
    }
    let (report, beside) = measure();
    print(&report, &beside);
    if args.iter().any(|arg| arg == "--json") {
        println!("{}", serde_json::to_string(&report).expect("numbers are JSON"));
    }
}

fn measure() -> (Report, Beside) {
    let floors = rounds("floors", |_| Floors::measure());
    let floors = Floors::medians(&floors);
    let throughput = rounds("throughput", |_| {
        let mut bench = Bench::open(Spin::Adaptive);
        (scenario::throughput_per_s(&mut bench.echoes), bench.echoes.returned())
    });
    let submits =
        rounds("submit", |_| scenario::submit_ns(&mut Bench::open(Spin::Adaptive).echoes));
    let rtt_idle_sleep_us = median(rounds("round trip, sleeping worker", |_| {
        scenario::rtt_idle_ns(&mut Bench::open(Spin::Adaptive).echoes) / 1_000.0
    }));
    let spinning = rounds("round trips, spinning worker", |_| {
        let mut bench = Bench::open(Spin::Always);
        (scenario::rtt_idle_ns(&mut bench.echoes), bench.rtt_depth1_ns())
    });
    eprintln!("idle worker");
    let idle_cpu_percent = latency::idle_cpu_percent();
    let scans = rounds("watchdog scans", |_| (scan_ns(8, 8), scan_ns(64, 64)));
    let actors = rounds("through the actors", |_| Actors::measure());
    eprintln!("failover");
    let failovers = failover::times_ms();
    let copies = rounds("64 KiB", copy::rates_per_s);
    let report = Report {
        accepted: throughput.iter().map(|(_, returned)| *returned).fold(1.0, f64::min),
        throughput_per_s: median(throughput.iter().map(|(per_s, _)| *per_s)),
        submit_ns: median(submits.iter().map(|ns| ns.burst)),
        rtt_idle_sleep_us,
        rtt_idle_spin_ns: median(spinning.iter().map(|times| times.0)),
        rtt_depth1_ns: median(spinning.iter().map(|times| times.1)),
        line_rtt_ns: floors.line_rtt_ns,
        futex_wake_us: floors.wake_to_run_ns / 1_000.0,
        idle_cpu_percent,
        scan_8_ns: median(scans.iter().map(|times| times.0)),
        scan_64_ns: median(scans.iter().map(|times| times.1)),
        actor_submit_over_floor: median(actors.iter().map(|a| a.submit_ns / a.floor_ns)),
        actor_batch_per_s: median(actors.iter().map(|a| a.batch_per_s)),
        failover_ms: median(failovers.iter().copied()),
        copy_ratio_64k: median(copies.iter().map(|rates| rates.passes / rates.raw)),
    };
    let beside = Beside {
        floors,
        sustained_ns: median(submits.iter().map(|ns| ns.sustained)),
        failovers: failovers.len(),
        actor_floor_ns: median(actors.iter().map(|a| a.floor_ns)),
        actor_submit_ns: median(actors.iter().map(|a| a.submit_ns)),
        copies_per_s: median(copies.iter().map(|rates| rates.raw)),
        passes_64k_per_s: median(copies.iter().map(|rates| rates.passes)),
    };
    (report, beside)
}

fn rounds<T>(what: &str, mut measure: impl FnMut(usize) -> T) -> Vec<T> {
    (1..=ROUNDS)
        .map(|round| {
            eprintln!("{what}, {round} of {ROUNDS}");
            measure(round)
        })
        .collect()
}

fn print(report: &Report, beside: &Beside) {
    let line = report.line_rtt_ns;
    println!("floors of this run");
    println!("  cache line, round trip     {line:.0} ns");
    println!("  futex wake, nobody waits   {:.0} ns", beside.floors.wake_nobody_ns);
    println!("  futex wake to run, idle    {:.1} us", report.futex_wake_us);
    println!("passes of 48 bytes to a worker process");
    println!("  accepted                   {:.3} (all: 1.000)", report.accepted);
    println!(
        "  throughput, 512 in flight  {:.2} M/s (1.2 x the peer's: benches/peers)",
        report.throughput_per_s / 1e6
    );
    println!(
        "  submit while it drains     {:.1} ns (0.5 x the peer's, and the channel's: benches/peers)",
        report.submit_ns
    );
    println!("  and poll after each        {:.1} ns", beside.sustained_ns);
    println!(
        "  after 5 ms idle, sleeping  {:.1} us (0.6 x the peer's: benches/peers)",
        report.rtt_idle_sleep_us
    );
    println!(
        "  after 5 ms idle, spinning  {:.0} ns (at most 20 x the line: {:.0})",
        report.rtt_idle_spin_ns,
        20.0 * line
    );
    println!(
        "  back to back, spinning     {:.0} ns (at most 6 x the line: {:.0})",
        report.rtt_depth1_ns,
        6.0 * line
    );
    println!(
        "  idle worker                {:.2} % of a core (at most 0.5)",
        report.idle_cpu_percent
    );
    println!(
        "watchdog scan in memory, every row beating, with the reading of the clock ({:.1} ns)",
        beside.floors.clock_ns
    );
    println!("  8 slots                    {:.1} ns (the peer's: benches/peers)", report.scan_8_ns);
    println!(
        "  64 slots                   {:.1} ns (the peer's: benches/peers)",
        report.scan_64_ns
    );
    println!("through the actors");
    println!("  an echo and a wake         {:.0} ns", beside.actor_floor_ns);
    println!(
        "  one at a time              {:.0} ns: {:.2} x (at most 3)",
        beside.actor_submit_ns, report.actor_submit_over_floor
    );
    println!("  batches of 64              {:.2} M/s (at least 2)", report.actor_batch_per_s / 1e6);
    println!("kill -9 of a worker, {} times", beside.failovers);
    println!("  its pass runs elsewhere    {:.2} ms (median, at most 5)", report.failover_ms);
    println!("64 KiB of arguments, {} in flight", copy::DEPTH);
    println!("  raw copy                   {:.0} /s", beside.copies_per_s);
    println!("  passes                     {:.0} /s", beside.passes_64k_per_s);
    println!("  ratio                      {:.2} (at least 0.5)", report.copy_ratio_64k);
}
