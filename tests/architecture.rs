//! Holds the actor table of ARCHITECTURE.md against what the wiring recorded.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[cfg(target_os = "linux")]
use meshwork::Passes;
use meshwork::{Mesh, WiringRecord};

#[derive(Debug)]
struct Row {
    arbiter: String,
    bound: String,
    receives: String,
    sends: String,
}

/// The rows of the actor table, by actor.
fn rows() -> BTreeMap<String, Row> {
    let text = include_str!("../ARCHITECTURE.md");
    let table = text.split("| actor | arbiter |").nth(1).expect("the actor table is there");
    let table = table.split("\n\n").next().unwrap_or_default();
    let lines = table.lines().skip(2);
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [actor, arbiter, bound, receives, sends, _] = cells[..] else {
                panic!("not six cells: {line}");
            };
            let row = Row {
                arbiter: arbiter.into(),
                bound: bound.into(),
                receives: receives.into(),
                sends: sends.into(),
            };
            (actor.trim_matches('`').to_owned(), row)
        })
        .collect()
}

/// The pairs (message, receiver) that a cell of the form "`A`, `B` to X, Y; `C` to Z" names.
fn sent(cell: &str) -> BTreeSet<(String, String)> {
    let mut pairs = BTreeSet::new();
    for part in cell.split("; ") {
        let Some((messages, receivers)) = part.split_once(" to ") else { continue };
        for message in messages.split(", ") {
            for receiver in receivers.split(", ") {
                pairs.insert((message.trim_matches('`').to_owned(), receiver.to_owned()));
            }
        }
    }
    pairs
}

/// Of a node that has everything.
async fn recorded() -> WiringRecord {
    let directory = tempfile::tempdir().unwrap();
    let builder = Mesh::builder("a");
    #[cfg(target_os = "linux")]
    let builder = builder.passes(Passes::builder(directory.path()));
    let mesh = builder.start().await.unwrap();
    let record = mesh.wiring().clone();
    mesh.drain(Duration::from_secs(5)).await;
    record
}

#[actix::test]
async fn the_actor_table_says_what_the_wiring_does() {
    let record = recorded().await;
    let rows = rows();
    let actors: BTreeSet<&str> = record.actors.iter().map(|a| a.name).collect();
    let documented: BTreeSet<&str> =
        rows.keys().map(String::as_str).filter(|name| !name.contains("Store`,")).collect();
    assert_eq!(documented, actors, "the table has every actor that is started, and no other");
    agree(&record, &rows);
}

#[cfg(target_os = "linux")]
#[actix::test]
async fn the_table_holds_for_passes_without_a_node() {
    let directory = tempfile::tempdir().unwrap();
    let rows = rows();
    let passes = Passes::builder(directory.path()).start().await.unwrap();
    let record = passes.workers().wiring().unwrap().clone();
    passes.leave().await;
    let mut actors: Vec<&str> = record.actors.iter().map(|a| a.name).collect();
    actors.sort_unstable();
    let all = ["HeartbeatWriter", "PassSubmitter", "PassWorker", "ResultCollector", "Watchdog"];
    assert_eq!(actors, all);
    let rows = rows.into_iter().map(|(name, mut row)| {
        // What a node's collector does beside.
        if name == "ResultCollector" {
            row.sends.clear();
        }
        (name, row)
    });
    agree(&record, &rows.collect());

    let workers = Passes::builder(directory.path()).start_workers().await.unwrap();
    let record = workers.wiring().unwrap().clone();
    workers.leave().await;
    assert!(record.actors.iter().all(|actor| actor.name != "PassSubmitter"));
    assert_eq!(record.edges, []);
}

/// Holds each actor that was started, and each recipient that was handed out, against its row.
fn agree(record: &WiringRecord, rows: &BTreeMap<String, Row>) {
    let actors: BTreeSet<&str> = record.actors.iter().map(|a| a.name).collect();
    for actor in &record.actors {
        let row = &rows[actor.name];
        assert_eq!(row.arbiter, actor.arbiter, "arbiter of {}", actor.name);
        assert_eq!(row.bound, actor.bound.to_string(), "bound of {}", actor.name);
        let wired: BTreeSet<(String, String)> = record
            .edges
            .iter()
            .filter(|edge| edge.from == actor.name)
            .map(|edge| (edge.message.to_owned(), edge.to.to_owned()))
            .collect();
        let documented: BTreeSet<(String, String)> = sent(&row.sends)
            .into_iter()
            .filter(|(_, receiver)| actors.contains(receiver.as_str()))
            .collect();
        assert_eq!(documented, wired, "what {} sends", actor.name);
    }
    for edge in &record.edges {
        let receives = &rows[edge.to].receives;
        let named = receives.split(", ").any(|cell| cell.trim_matches('`') == edge.message);
        assert!(
            named,
            "{} receives {} from {}, which the table does not say",
            edge.to, edge.message, edge.from
        );
    }
}
