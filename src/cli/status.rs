//! `meshwork status`: an operator's view of a running node.

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::cli::args::StatusArgs;
use crate::cli::ndjson::{read_line, to_line};
use crate::cli::protocol::{Asked, Request, Said, Status};
use crate::cli::socket::{default_path, runtime_folder};

/// Time for a node to accept the connection and to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Asks the node and prints the answer.
pub(crate) fn run(args: &StatusArgs) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let answered = match runtime {
        Ok(runtime) => runtime.block_on(ask(args)),
        Err(e) => Err(e.to_string()),
    };
    match answered {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn ask(args: &StatusArgs) -> Result<(), String> {
    let path = match (&args.socket, &args.node) {
        (Some(path), _) => path.clone(),
        (None, Some(node)) => default_path(node),
        (None, None) => only_socket(&runtime_folder())?,
    };
    let shown = path.display();
    let nobody = |e: &dyn std::fmt::Display| format!("no node answers at {shown}: {e}");
    let connected = timeout(ANSWER_LIMIT, UnixStream::connect(&path)).await;
    let stream = connected.map_err(|e| nobody(&e))?.map_err(|e| nobody(&e))?;
    let (reader, mut writer) = stream.into_split();
    let request = if args.watch { Request::Watch } else { Request::Status };
    let line = to_line(&Asked { id: 1, request });
    writer.write_all(&line).await.map_err(|e| nobody(&e))?;
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    if args.watch {
        while let Some(()) = read_line(&mut reader, &mut line).await.map_err(|e| nobody(&e))? {
            line.push(b'\n');
            if !print(&line)? {
                break;
            }
        }
        return Ok(());
    }
    let read = timeout(ANSWER_LIMIT, read_line(&mut reader, &mut line)).await;
    let read = read.map_err(|e| nobody(&e))?.map_err(|e| nobody(&e))?;
    read.ok_or_else(|| nobody(&"it closed the connection"))?;
    let status = match serde_json::from_slice(&line).map_err(|e| nobody(&e))? {
        Said::Status { status, .. } => status,
        Said::Error { message, .. } => return Err(message),
        other => return Err(nobody(&format!("it said {other:?}"))),
    };
    let text = if args.json {
        serde_json::to_string(&status).map_err(|e| e.to_string())? + "\n"
    } else {
        table(&status)
    };
    print(text.as_bytes()).map(|_| ())
}

/// Prints; false when nobody reads any more.
pub(crate) fn print(text: &[u8]) -> Result<bool, String> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(format!("stdout: {e}")),
    }
}

/// The one socket in the runtime folder.
fn only_socket(folder: &Path) -> Result<PathBuf, String> {
    let shown = folder.display();
    let none = || format!("no node runs here: {shown} holds no socket; name one with --socket");
    let entries = std::fs::read_dir(folder).map_err(|_| none())?;
    let mut sockets: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "sock"))
        .collect();
    sockets.sort();
    match &sockets[..] {
        [] => Err(none()),
        [socket] => Ok(socket.clone()),
        several => {
            let names = several.iter().filter_map(|path| path.file_stem());
            let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
            Err(format!("several nodes run here, name one: {}", names.join(", ")))
        }
    }
}

fn table(status: &Status) -> String {
    let mut text = format!(
        "{}: generation {}, gossip {}, steal {}\n\n",
        status.id, status.generation, status.gossip, status.steal
    );
    let mut members = new_table();
    members.set_header(["member", "state", "generation", "incarnation", "gossip", "steal"]);
    for member in &status.members {
        members.add_row([
            member.id.to_string(),
            member.state.name().into(),
            member.generation.to_string(),
            member.incarnation.to_string(),
            member.gossip.to_string(),
            member.steal.to_string(),
        ]);
    }
    push(&mut text, &members);
    let load = status.load;
    text.push_str(&format!(
        "\ndeque: {} waiting, {} of them stealable; {} running in {} slots; {:.1} ms a job\n\n",
        load.queued,
        load.stealable,
        load.running,
        load.slots,
        f64::from(load.service_us) / 1_000.0,
    ));
    match &status.store {
        None => text.push_str("store: it does not answer\n\n"),
        Some(states) => {
            let rows = states.iter().filter(|(_, n)| **n > 0);
            let rows: Vec<_> = rows.map(|(state, n)| format!("{n} {state}")).collect();
            let rows = if rows.is_empty() { "no jobs".into() } else { rows.join(", ") };
            text.push_str(&format!("store: {rows}\n\n"));
        }
    }
    let mut counters = new_table();
    for (name, value) in &status.counters {
        counters.add_row([name.clone(), value.to_string()]);
    }
    if let Some(values) = counters.column_mut(1) {
        values.set_cell_alignment(CellAlignment::Right);
    }
    push(&mut text, &counters);
    text
}

pub(crate) fn new_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
}

pub(crate) fn push(text: &mut String, table: &Table) {
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use meshwork::{Generation, Load, Member, MemberState, NodeId};

    use super::*;

    #[test]
    fn the_table_is_for_people() {
        let addr = |port| format!("127.0.0.1:{port}").parse().unwrap();
        let member = |id, state| Member {
            id: NodeId::new(id).unwrap(),
            generation: Generation(2),
            incarnation: Default::default(),
            state,
            gossip: addr(1),
            steal: addr(2),
        };
        let load =
            Load { queued: 7, stealable: 5, running: 4, slots: 4, service_us: 20_500, version: 1 };
        let status = Status {
            id: NodeId::new("a").unwrap(),
            generation: Generation(2),
            gossip: addr(1),
            steal: addr(2),
            members: vec![member("a", MemberState::Alive), member("b", MemberState::Dead)],
            load,
            counters: BTreeMap::from([("local_pops".into(), 12)]),
            store: Some(BTreeMap::from([("queued".into(), 0), ("running".into(), 4)])),
        };
        assert_eq!(
            table(&status).lines().collect::<Vec<_>>(),
            [
                "a: generation 2, gossip 127.0.0.1:1, steal 127.0.0.1:2",
                "",
                " member  state  generation  incarnation  gossip       steal",
                " a       alive  2           0            127.0.0.1:1  127.0.0.1:2",
                " b       dead   2           0            127.0.0.1:1  127.0.0.1:2",
                "",
                "deque: 7 waiting, 5 of them stealable; 4 running in 4 slots; 20.5 ms a job",
                "",
                "store: 4 running",
                "",
                " local_pops  12",
            ]
        );
    }

    #[test]
    fn the_only_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            only_socket(&dir.path().join("gone")).unwrap_err().starts_with("no node runs here")
        );
        assert!(only_socket(dir.path()).unwrap_err().starts_with("no node runs here"));
        for name in ["a.sock", "b.txt"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(only_socket(dir.path()), Ok(dir.path().join("a.sock")));
        std::fs::write(dir.path().join("c.sock"), "").unwrap();
        let several = only_socket(dir.path()).unwrap_err();
        assert_eq!(several, "several nodes run here, name one: a, c");
    }
}
