//! The binary's stand-alone node, and what an operator sees of it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

fn temp() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("mw").tempdir_in("/tmp").expect("a temporary folder")
}

/// The binary, whose runtime folder and database are in `temp`.
fn meshwork(temp: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwork"));
    command
        .args(args)
        .current_dir(temp)
        .env("XDG_RUNTIME_DIR", temp)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

fn run(temp: &Path, args: &[&str]) -> Output {
    meshwork(temp, args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A node that has started.
struct Node {
    process: Child,
    stdout: BufReader<ChildStdout>,
    gossip: String,
    socket: PathBuf,
}

impl Node {
    fn start(temp: &Path, args: &[&str]) -> Self {
        let args = [&["node", "--bind", "127.0.0.1:0"], args].concat();
        let mut process =
            meshwork(temp, &args).stdout(Stdio::piped()).spawn().expect("the binary runs");
        let mut stdout = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("stdout is text");
        let after = |word: &str| {
            let (_, rest) = line.split_once(word).expect("the line says where it is");
            rest.split([',', '\n']).next().expect("a part").to_owned()
        };
        let (gossip, socket) = (after("gossip "), after("socket ").into());
        Self { process, stdout, gossip, socket }
    }

    /// Sends a signal and returns the exit status and what the node said after it.
    fn stop(mut self, signal: Signal) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.process), signal).expect("the node is there");
        let mut said = String::new();
        self.stdout.read_to_string(&mut said).expect("stdout is text");
        (self.process.wait().expect("it ends").code(), said)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A failed test leaves no process; one that has ended needs none.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Asks by the socket, line by line.
struct Client {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Client {
    fn connect(socket: &Path) -> Self {
        let writer = UnixStream::connect(socket).expect("the node answers");
        let reader = BufReader::new(writer.try_clone().expect("a second handle"));
        Self { writer, reader }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.writer, "{line}").expect("the node reads");
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("the node writes text");
        serde_json::from_str(&line).expect("the node writes JSON")
    }
}

#[test]
fn a_node_runs_jobs_is_looked_at_and_leaves_in_order() {
    let temp = temp();
    let node = Node::start(temp.path(), &["--id", "a", "--db", "jobs.db"]);
    assert_eq!(node.socket, temp.path().join("meshwork/a.sock"));
    let mode = |path: &Path| fs::metadata(path).expect("it is there").mode() & 0o777;
    assert_eq!((mode(&node.socket), mode(&temp.path().join("meshwork"))), (0o600, 0o700));

    let file = temp.path().join("file");
    fs::write(&file, "one\ntwo\n").expect("a file");
    let mut client = Client::connect(&node.socket);
    client.send(r#"{"id":1,"request":"watch"}"#);
    assert_eq!(client.hear(), json!({"say": "watching", "re": 1}));
    let job = json!({"handler": "digest", "arguments": {"path": file}});
    client.send(&json!({"id": 2, "request": "enqueue", "jobs": [job]}).to_string());
    let mut result = None;
    let mut accepted = false;
    while result.is_none() || !accepted {
        let said = client.hear();
        accepted |= said == json!({"say": "enqueued", "re": 2, "accepted": 1, "duplicates": 0});
        let events = said["events"].as_array().cloned().unwrap_or_default();
        result = result
            .or(events.iter().find_map(|e| e["recorded"]["Succeeded"].as_str().map(String::from)));
    }
    let digest = format!("{:016x}", xxh3_64(b"one\ntwo\n"));
    let expected = format!(r#"{{"xxh3":"{digest}","bytes":8,"lines":2}}"#);
    assert_eq!(result, Some(expected));

    client.send("dance");
    client.send(r#"{"id":3,"request":"enqueue","jobs":[{"handler":"mine","arguments":1}]}"#);
    client.send(r#"{"id":4,"request":"start","peers":[],"seeds":[]}"#);
    let mut refused = Vec::new();
    while refused.len() < 3 {
        let said = client.hear();
        if said["say"] == "error" {
            refused.push((said["re"].clone(), said["message"].to_string()));
        }
    }
    assert_eq!(refused[0].0, 0);
    assert_eq!(refused[1].0, 3);
    assert!(refused[1].1.contains("no handler `mine`"), "{refused:?}");
    assert_eq!(refused[2].0, 4);

    let status = run(temp.path(), &["status", "--json"]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("the status is JSON");
    assert_eq!(status["id"], "a");
    assert_eq!(status["members"][0]["state"], "alive");
    assert_eq!(status["counters"]["jobs_succeeded"], 1);
    assert_eq!(status["store"]["succeeded"], 1);
    let table = run(temp.path(), &["status", "a"]);
    let table = text(&table.stdout);
    assert!(table.starts_with("a: generation 1, gossip 127.0.0.1:"), "{table}");
    assert!(table.contains("store: 1 succeeded"), "{table}");

    let mut watch = meshwork(temp.path(), &["status", "--watch"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut watched = BufReader::new(watch.stdout.take().expect("stdout is piped"));
    let mut line = String::new();
    watched.read_line(&mut line).expect("it prints text");
    assert_eq!(line, "{\"say\":\"watching\",\"re\":1}\n");

    let socket = node.socket.clone();
    let (code, said) = node.stop(Signal::TERM);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("left: all running jobs have ended"), "{said}");
    assert!(!socket.exists());
    let mut rest = String::new();
    watched.read_to_string(&mut rest).expect("it prints text");
    assert_eq!(watch.wait().expect("it ends").code(), Some(0));
    let gone = run(temp.path(), &["status", "a"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(text(&gone.stderr).starts_with("error: no node answers at "), "{}", text(&gone.stderr));
}

#[test]
fn nodes_join_by_a_seed_and_an_interrupt_is_a_goodbye() {
    let temp = temp();
    let a = Node::start(temp.path(), &["--id", "a"]);
    let b = Node::start(temp.path(), &["--id", "b", "--seed", &a.gossip]);
    let states = |node: &Node| {
        let mut client = Client::connect(&node.socket);
        client.send(r#"{"request":"status"}"#);
        let said = client.hear();
        let members = said["status"]["members"].as_array().cloned().unwrap_or_default();
        let state = |m: Value| format!("{} {}", m["id"], m["state"]).replace('"', "");
        members.into_iter().map(state).collect::<Vec<_>>()
    };
    assert_eq!(states(&b), ["a alive", "b alive"]);
    let mut watch = Client::connect(&a.socket);
    watch.send(r#"{"request":"watch"}"#);
    assert_eq!(watch.hear()["say"], "watching");
    while watch.hear()["present"] != 2 {}
    assert_eq!(b.stop(Signal::INT).0, Some(0));
    let left = loop {
        let said = watch.hear();
        if said["say"] == "membership" && said["present"] == 1 {
            break said;
        }
    };
    assert_eq!((&left["change"], &left["member"]), (&"left".into(), &"b".into()));
    assert_eq!(states(&a), ["a alive", "b left"]);
    let several = run(temp.path(), &["status", "a"]);
    assert!(several.status.success());
}

#[test]
fn a_name_or_a_port_in_use_is_told() {
    let temp = temp();
    let a = Node::start(temp.path(), &["--id", "a"]);
    let refused = |args: &[&str], says: &str| {
        let output = run(temp.path(), &[&["node"], args].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    };
    // By the socket, by the shared database, by the mesh.
    refused(&["--id", "a"], "--socket: a running node answers at ");
    let other = ["--id", "a", "--bind", "127.0.0.1:0", "--socket", "other.sock"];
    refused(&other, "node id `a` is in use: the node at 127.0.0.1:");
    let strange = [&other[..], &["--db", "other.db", "--seed", &a.gossip]].concat();
    refused(&strange, "node id `a` is in use: the node at 127.0.0.1:");

    let udp = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let taken = udp.local_addr().expect("it is bound").to_string();
    refused(&["--id", "b", "--bind", &taken], &taken);
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = tcp.local_addr().expect("it is bound").to_string();
    refused(&["--id", "b", "--bind", &taken], &taken);
}

#[test]
fn what_no_node_can_be_started_from_is_told() {
    let temp = temp();
    fs::write(temp.path().join("letter"), "Dear database, ".repeat(100)).expect("a file");
    for (args, code, says) in [
        (&["--id", "two words"][..], 2, "'--id <NAME>'"),
        (&["--id", "a", "--slots", "0"], 2, "'--slots <N>'"),
        (&["--id", "a", "--drain", "x"], 2, "'--drain <S>'"),
        (&["--id", "a", "--bind", "nowhere"], 1, "bind"),
        (&["--id", "a", "--bind", "0.0.0.0:0"], 1, "loopback"),
        (&["--id", "a", "--bind", "127.0.0.1:0", "--db", "letter"], 1, "letter"),
        (&["--id", "a", "--bind", "127.0.0.1:0", "--db", "/nowhere/x"], 1, "/nowhere/x"),
        (&["--id", "a", "--bind", "127.0.0.1:0", "--seed", "nowhere"], 1, "seed"),
        (&["--id", "a", "--bind", "127.0.0.1:0", "--socket", "letter"], 1, "is no socket"),
    ] {
        let output = run(temp.path(), &[&["node"], args].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    }
    assert_eq!(fs::read(temp.path().join("letter")).expect("it is there").len(), 1_500);
}

#[test]
fn help_and_version_are_for_people() {
    let temp = temp();
    for (args, says) in [
        (&["--version"][..], "meshwork 0.1.0"),
        (&["--help"], "Examples:"),
        (&["demo", "--help"], "--kill <NODE[@PERCENT]>"),
        (&["node", "--help"], "--seed <ADDR>"),
        (&["status", "--help"], "--json"),
    ] {
        let output = run(temp.path(), args);
        assert!(output.status.success());
        assert!(text(&output.stdout).contains(says), "{args:?}: {}", text(&output.stdout));
        assert!(!text(&output.stdout).contains("demo-node"), "{args:?}");
    }
}
