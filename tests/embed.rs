//! The example service, as its user meets it: two processes, HTTP, one database.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// A running service; ended with the test, whatever happens.
struct Service {
    child: Child,
    stdout: BufReader<ChildStdout>,
    http: String,
    gossip: String,
}

/// Builds the example, in the profile of this test, and says where it is: cargo does so by itself
/// only when all tests are asked for.
fn example() -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--example", "embed"]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "the example builds");
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples/embed")
}

impl Service {
    fn start(id: &str, database: &str, seeds: &[&str]) -> Self {
        let mut child = Command::new(example())
            .args([id, "127.0.0.1:0", database])
            .args(seeds)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let rest = line.split_once(" serves http://").expect("it says where").1;
        let (http, gossip) = rest.split_once(", and gossips at ").expect("it says where");
        Self { child, stdout, http: http.into(), gossip: gossip.trim().into() }
    }

    fn request(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{head} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// The status and the body of a whole answer.
    fn ask(&self, head: &str, body: &str) -> (u16, String) {
        let mut text = String::new();
        self.request(head, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
    }

    /// Ends it as an operator would, and returns what it said.
    fn interrupt(mut self) -> String {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        let mut said = String::new();
        self.stdout.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success());
        said
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_service_enqueues_answers_outcomes_and_streams_events() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("jobs.db").display().to_string();
    let first = Service::start("worker-1", &database, &[]);

    let (status, body) = first.ask("POST /words", r#"{"text":"To be or not to be"}"#);
    assert_eq!(status, 200, "{body}");
    let count: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(count["words"]["to"], 2);
    assert_eq!(count["node"], "worker-1");

    let many: Vec<String> = (0..1_001).map(|n| format!("word{n}")).collect();
    let (status, body) =
        first.ask("POST /words", &serde_json::json!({ "text": many.join(" ") }).to_string());
    assert_eq!((status, body.as_str()), (422, "more than 1000 words"));

    let mut events = BufReader::new(first.request("GET /events", ""));
    let mut next_event = |name: &str| loop {
        let mut line = String::new();
        assert_ne!(events.read_line(&mut line).unwrap(), 0, "the stream goes on until {name}");
        // Chunk sizes and headers are no JSON objects.
        let Ok(event @ Value::Object(_)) = serde_json::from_str::<Value>(&line) else { continue };
        if event["event"] == name {
            return event;
        }
    };
    assert_eq!(next_event("snapshot")["members"][0]["id"], "worker-1");
    let second = Service::start("worker-2", &database, &[&first.gossip]);
    assert_eq!(next_event("joined")["member"]["id"], "worker-2");
    let (status, _) = second.ask("POST /words", r#"{"text":"from the other one"}"#);
    assert_eq!(status, 200);
    let said = second.interrupt();
    assert!(said.contains("finished: true") && said.contains("retired: true"), "{said}");
    assert_eq!(next_event("left")["member"]["id"], "worker-2");

    let (_, metrics) = first.ask("GET /metrics", "");
    let metrics: Value = serde_json::from_str(&metrics).unwrap();
    assert!(metrics["jobs_started"].as_u64() >= Some(2), "{metrics}");
}
