//! `meshwork passes`: who works in a directory of passes, and how fast.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use comfy_table::CellAlignment;
use meshwork::passes::{
    ClientSnapshot, InFlight, PassHost, PassRates, PassSnapshot, RunningPass, WorkerSnapshot,
};
use serde::Serialize;

use crate::cli::args::PassesArgs;
use crate::cli::ndjson::to_line;
use crate::cli::status::{new_table, print, push};

/// Clears a terminal and puts the cursor in its corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    directory: Cow<'a, str>,
    #[serde(flatten)]
    snapshot: &'a PassSnapshot,
    rates: PassRates,
}

/// Looks twice, or again and again, and prints what it saw.
pub(crate) fn run(args: &PassesArgs) -> ExitCode {
    match show(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn show(args: &PassesArgs) -> Result<(), String> {
    // Opened anew for each look: a directory that is removed meanwhile is an error, not a still life.
    let look = || PassHost::look(&args.directory).map_err(|e| e.to_string());
    let clears = args.watch && !args.json && io::stdout().is_terminal();
    let mut earlier = look()?;
    loop {
        sleep(Duration::from_millis(args.interval.into()));
        let snapshot = look()?;
        let rates = PassRates::between(&earlier, &snapshot);
        let text = if args.json {
            let directory = args.directory.to_string_lossy();
            to_line(&Report { directory, snapshot: &snapshot, rates })
        } else {
            let table = table(&args.directory, &snapshot, rates);
            let (before, after) = match (clears, args.watch) {
                (true, _) => (CLEAR, ""),
                (false, true) => ("", "\n"),
                (false, false) => ("", ""),
            };
            format!("{before}{table}{after}").into_bytes()
        };
        if !print(&text)? || !args.watch {
            return Ok(());
        }
        earlier = snapshot;
    }
}

fn table(directory: &Path, snapshot: &PassSnapshot, rates: PassRates) -> String {
    let geometry = snapshot.geometry;
    let mut text = format!(
        "{}: at most {} workers, {} clients of {} slots, {} KiB a payload\n\n",
        directory.display(),
        geometry.workers,
        geometry.clients,
        geometry.slots_per_client,
        geometry.payload_bytes / 1_024,
    );
    if snapshot.workers.is_empty() {
        text.push_str("no workers: nothing that is submitted is run\n");
    } else {
        let mut workers = new_table();
        workers
            .set_header(["worker", "name", "pid", "state", "up", "finished", "runs", "running"])
            .add_rows(snapshot.workers.iter().map(worker_row));
        align(&mut workers, &[5]);
        push(&mut text, &workers);
    }
    text.push('\n');
    if snapshot.clients.is_empty() {
        text.push_str("no clients: nobody submits\n");
    } else {
        let mut clients = new_table();
        clients
            .set_header([
                "client",
                "name",
                "pid",
                "state",
                "up",
                "slots",
                "ready",
                "claimed",
                "done",
                "collected",
            ])
            .add_rows(snapshot.clients.iter().map(client_row));
        align(&mut clients, &[6, 7, 8, 9]);
        push(&mut text, &clients);
    }
    let InFlight { ready, claimed, done } = snapshot.in_flight;
    let counters = snapshot.counters;
    let _ = write!(
        text,
        "\nin flight: {ready} ready, {claimed} claimed, {done} done\n\
         rates: {:.0} finished/s, {:.0} collected/s\n\
         so far: {} requeued, {} poisoned, {} adopted, {} orphaned\n",
        rates.finished_per_s,
        rates.collected_per_s,
        counters.requeued,
        counters.poisoned,
        counters.adopted,
        counters.orphaned,
    );
    text
}

fn align(table: &mut comfy_table::Table, numbers: &[usize]) {
    for column in numbers {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

fn worker_row(worker: &WorkerSnapshot) -> [String; 8] {
    let runs: Vec<_> = worker.runs.iter().map(|name| shown(name)).collect();
    [
        worker.worker.0.to_string(),
        shown(&worker.name),
        worker.pid.to_string(),
        worker.state.name().into(),
        span(worker.up_us),
        worker.finished.to_string(),
        if runs.is_empty() { "-".into() } else { runs.join(", ") },
        worker.running.as_ref().map_or_else(|| "-".into(), running),
    ]
}

fn running(pass: &RunningPass) -> String {
    let mut text = format!("{} {}", shown(&pass.closure), pass.pass);
    if pass.attempt > 0 {
        let _ = write!(text, ", attempt {}", pass.attempt);
    }
    match pass.left_us {
        Some(left @ 0..) => {
            let _ = write!(text, ", {} left", span(left.unsigned_abs()));
        }
        Some(past) => {
            let _ = write!(text, ", {} past its deadline", span(past.unsigned_abs()));
        }
        None => {}
    }
    text
}

fn client_row(client: &ClientSnapshot) -> [String; 10] {
    [
        client.client.0.to_string(),
        shown(&client.name),
        client.pid.to_string(),
        client.state.name().into(),
        span(client.up_us),
        format!("{}..{}", client.first_slot, client.first_slot + client.slots),
        client.in_flight.ready.to_string(),
        client.in_flight.claimed.to_string(),
        client.in_flight.done.to_string(),
        client.collected.to_string(),
    ]
}

/// A name that other processes chose: whatever it holds, it stays in its cell.
fn shown(name: &str) -> String {
    if name.is_empty() {
        return "-".into();
    }
    name.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// A time for people: two digits or three, and a unit.
fn span(us: u64) -> String {
    let seconds = us as f64 / 1e6;
    match us {
        0..1_000_000 => format!("{} ms", us / 1_000),
        1_000_000..60_000_000 => format!("{seconds:.1} s"),
        60_000_000..3_600_000_000 => format!("{:.1} min", seconds / 60.0),
        3_600_000_000..86_400_000_000 => format!("{:.1} h", seconds / 3_600.0),
        _ => format!("{:.1} d", seconds / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use meshwork::passes::{ClientIndex, Geometry, PassCounters, PassId, Presence, WorkerIndex};

    use super::*;

    fn worker(index: u16, name: &str, state: Presence) -> WorkerSnapshot {
        WorkerSnapshot {
            worker: WorkerIndex(index),
            epoch: 1,
            name: name.into(),
            pid: 4_711,
            state,
            up_us: 65_000_000,
            finished: 0,
            runs: Vec::new(),
            running: None,
        }
    }

    fn client(index: u16, name: &str, state: Presence, in_flight: InFlight) -> ClientSnapshot {
        ClientSnapshot {
            client: ClientIndex(index),
            epoch: 1,
            name: name.into(),
            pid: 99,
            state,
            up_us: 2_500_000,
            first_slot: 512 * u32::from(index),
            slots: 512,
            in_flight,
            collected: 0,
        }
    }

    fn empty() -> PassSnapshot {
        PassSnapshot {
            taken_us: 7_000_000,
            geometry: Geometry::default(),
            workers: Vec::new(),
            clients: Vec::new(),
            in_flight: InFlight::default(),
            counters: PassCounters::default(),
        }
    }

    fn busy() -> PassSnapshot {
        let in_flight = InFlight { ready: 12, claimed: 1, done: 3 };
        PassSnapshot {
            workers: vec![
                WorkerSnapshot {
                    finished: 123_456,
                    runs: vec!["echo".into(), "resize".into()],
                    running: Some(RunningPass {
                        pass: PassId { slot: 5, generation: 71 },
                        closure: "resize".into(),
                        attempt: 1,
                        left_us: Some(250_000),
                    }),
                    ..worker(0, "w", Presence::Alive)
                },
                worker(3, "a\nb", Presence::Dead),
            ],
            clients: vec![
                ClientSnapshot {
                    collected: 98_765,
                    ..client(0, "web", Presence::Alive, in_flight)
                },
                client(1, "", Presence::Left, InFlight::default()),
            ],
            in_flight,
            counters: PassCounters { requeued: 2, poisoned: 1, adopted: 0, orphaned: 4 },
            ..empty()
        }
    }

    const RATES: PassRates = PassRates { finished_per_s: 1_234.4, collected_per_s: 1_200.0 };

    #[test]
    fn the_table_is_for_people() {
        let text = table(Path::new("/run/app"), &busy(), RATES);
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "/run/app: at most 64 workers, 16 clients of 512 slots, 64 KiB a payload",
                "",
                " worker  name  pid   state  up       finished  runs          running",
                " 0       w     4711  alive  1.1 min    123456  echo, resize  resize 5.71, attempt 1, 250 ms left",
                " 3       a\u{fffd}b   4711  dead   1.1 min         0  -             -",
                "",
                " client  name  pid  state  up     slots      ready  claimed  done  collected",
                " 0       web   99   alive  2.5 s  0..512        12        1     3      98765",
                " 1       -     99   left   2.5 s  512..1024      0        0     0          0",
                "",
                "in flight: 12 ready, 1 claimed, 3 done",
                "rates: 1234 finished/s, 1200 collected/s",
                "so far: 2 requeued, 1 poisoned, 0 adopted, 4 orphaned",
            ]
        );
    }

    #[test]
    fn a_directory_that_nobody_uses_is_told_as_such() {
        let rates = PassRates { finished_per_s: 0.0, collected_per_s: 0.0 };
        let text = table(Path::new("d"), &empty(), rates);
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "d: at most 64 workers, 16 clients of 512 slots, 64 KiB a payload",
                "",
                "no workers: nothing that is submitted is run",
                "",
                "no clients: nobody submits",
                "",
                "in flight: 0 ready, 0 claimed, 0 done",
                "rates: 0 finished/s, 0 collected/s",
                "so far: 0 requeued, 0 poisoned, 0 adopted, 0 orphaned",
            ]
        );
    }

    #[test]
    fn the_object_is_for_programs() {
        let snapshot = PassSnapshot { clients: Vec::new(), ..busy() };
        let report = Report { directory: "/run/app".into(), snapshot: &snapshot, rates: RATES };
        let line = String::from_utf8(to_line(&report)).unwrap();
        assert_eq!(
            line,
            concat!(
                r#"{"directory":"/run/app","taken_us":7000000,"#,
                r#""geometry":{"clients":16,"slots_per_client":512,"workers":64,"payload_bytes":65536},"#,
                r#""workers":[{"worker":0,"epoch":1,"name":"w","pid":4711,"state":"alive","#,
                r#""up_us":65000000,"finished":123456,"runs":["echo","resize"],"#,
                r#""running":{"pass":{"slot":5,"generation":71},"closure":"resize","attempt":1,"#,
                r#""left_us":250000}},"#,
                r#"{"worker":3,"epoch":1,"name":"a\nb","pid":4711,"state":"dead","#,
                r#""up_us":65000000,"finished":0,"runs":[],"running":null}],"#,
                r#""clients":[],"in_flight":{"ready":12,"claimed":1,"done":3},"#,
                r#""counters":{"requeued":2,"poisoned":1,"adopted":0,"orphaned":4},"#,
                r#""rates":{"finished_per_s":1234.4,"collected_per_s":1200.0}}"#,
                "\n"
            )
        );
    }

    #[test]
    fn spans_have_a_unit_that_fits() {
        let spans = [0, 999_999, 1_000_000, 59_900_000, 90_000_000, 5_400_000_000, 90_000_000_000];
        assert_eq!(
            spans.map(span),
            ["0 ms", "999 ms", "1.0 s", "59.9 s", "1.5 min", "1.5 h", "1.0 d"]
        );
    }

    #[test]
    fn a_pass_past_its_deadline_is_told() {
        let pass = RunningPass {
            pass: PassId { slot: 0, generation: 1 },
            closure: "0x7".into(),
            attempt: 0,
            left_us: Some(-3_000_000),
        };
        assert_eq!(running(&pass), "0x7 0.1, 3.0 s past its deadline");
    }
}
