//! The binary's demo, run as a person or a program would run it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// The binary, with a folder of its own for temporary files.
fn meshwork(temp: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwork"));
    command.env("TMPDIR", temp).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// In memory where that can be: on a disk that others write to, a commit may take as long as a lease.
fn temp() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let root = if memory.is_dir() { memory } else { Path::new("/tmp") };
    tempfile::Builder::new().prefix("mw").tempdir_in(root).expect("a temporary folder")
}

/// A folder of files of many sizes.
fn files(count: usize) -> tempfile::TempDir {
    let dir = temp();
    fs::create_dir(dir.path().join("sub")).expect("a folder");
    for n in 0..count {
        let name = if n % 2 == 0 { format!("f{n}") } else { format!("sub/f{n}") };
        fs::write(dir.path().join(name), "line\n".repeat(n * n)).expect("a file");
    }
    dir
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The result of a `--json` run, which is all that is on stdout.
fn report(output: &Output) -> Value {
    let stdout = text(&output.stdout);
    assert_eq!(stdout.lines().count(), 1, "{stdout}\n{}", text(&output.stderr));
    serde_json::from_str(&stdout).expect("the report is JSON")
}

fn assert_verified(report: &Value, stderr: &[u8]) {
    for (field, expected) in
        [("verified", Value::Bool(true)), ("lost", 0.into()), ("duplicates", 0.into())]
    {
        assert_eq!(report[field], expected, "{field} of {report}\n{}", text(stderr));
    }
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("the folder is there").next().is_none()
}

#[test]
fn every_job_has_its_outcome_and_every_digest_is_right() {
    let (dir, temp) = (files(40), temp());
    let out = temp.path().join("out.ndjson");
    let output = meshwork(temp.path())
        .args(["demo", "--headless", "--json", "--no-latency", "--jobs", "400", "--work-ms", "10"])
        .arg("--out")
        .arg(&out)
        .arg(dir.path())
        .output()
        .expect("the binary runs");
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_verified(&report, &output.stderr);
    let fields: Vec<_> = text(&output.stdout)
        .split('"')
        .filter(|word| report.get(word).is_some())
        .map(String::from)
        .take(16)
        .collect();
    assert_eq!(
        fields,
        [
            "nodes",
            "jobs",
            "succeeded",
            "failed",
            "lost",
            "duplicates",
            "reruns",
            "requeued",
            "steals",
            "stolen",
            "converged_ms",
            "first_steal_ms",
            "elapsed_ms",
            "efficiency",
            "per_node",
            "verified",
        ]
    );
    for (field, expected) in [
        ("nodes", 5),
        ("jobs", 400),
        ("succeeded", 400),
        ("failed", 0),
        ("reruns", 0),
        ("requeued", 0),
    ] {
        assert_eq!(report[field], expected, "{field} of {report}");
    }
    assert!(report["stolen"].as_u64() > Some(0), "{report}");
    let per_node = report["per_node"].as_array().expect("a list");
    let sum =
        |field: &str| per_node.iter().map(|n| n[field].as_u64().expect("a number")).sum::<u64>();
    assert_eq!((sum("enqueued"), sum("ran")), (400, 400));
    assert_eq!(sum("stolen_in"), report["stolen"].as_u64().expect("a number"));
    assert_eq!(sum("stolen_out"), sum("stolen_in"));
    assert_eq!(per_node[0]["enqueued"], 160);

    let rows = fs::read_to_string(&out).expect("the rows are there");
    assert_eq!(rows.lines().count(), 400);
    let mut paths = BTreeSet::new();
    for (seq, row) in rows.lines().enumerate() {
        let row: Value = serde_json::from_str(row).expect("a row is JSON");
        let path = PathBuf::from(row["path"].as_str().expect("a path"));
        let bytes = fs::read(&path).expect("the file is there");
        let lines = bytes.iter().filter(|&&b| b == b'\n').count();
        assert_eq!(row["seq"], seq);
        assert_eq!(row["xxh3"], format!("{:016x}", xxh3_64(&bytes)), "{row}");
        assert_eq!((&row["bytes"], &row["lines"]), (&bytes.len().into(), &lines.into()), "{row}");
        assert!(row["node"].is_string() && row["stolen"].is_boolean(), "{row}");
        paths.insert(path);
    }
    assert_eq!(paths.len(), 40);
    fs::remove_file(out).expect("the rows are there");
    assert!(is_empty(temp.path()), "the temporary folder is gone");
}

#[test]
fn without_a_word_the_demo_runs_over_this_folder() {
    let (dir, temp) = (files(20), temp());
    let output = meshwork(temp.path()).current_dir(dir.path()).output().expect("the binary runs");
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}{}", text(&output.stderr));
    for says in [
        "5 nodes of 4 slots, 4,000 jobs over 20 files of ., 20 ms of waiting each",
        "emulated between regions, round trips of up to 326 ms; the database has none",
        "idle nodes steal rather than claim",
        "ap-southeast-1 has joined, says ",
        "all 5 nodes see each other after",
        " steals ",
        "4,000 jobs: 4,000 succeeded, 0 failed, 0 lost, 0 with two outcomes",
        "verified: each job has one outcome",
    ] {
        assert!(stdout.contains(says), "{says}\n{stdout}");
    }
    assert!(!stdout.contains('\u{1b}'), "no colors without a terminal");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_killed_nodes_jobs_finish_elsewhere() {
    let (dir, temp) = (files(10), temp());
    let output = meshwork(temp.path())
        .args(["demo", "--headless", "--json", "--nodes", "3", "--jobs", "300", "--work-ms", "20"])
        .args(["--kill", "us-east-1@20"])
        .arg(dir.path())
        .output()
        .expect("the binary runs");
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}\n{}", text(&output.stderr));
    assert_verified(&report, &output.stderr);
    assert_eq!((&report["succeeded"], &report["killed"]), (&300.into(), &"us-east-1".into()));
    assert!(report["requeued"].as_u64() > Some(0), "{report}");
    assert!(is_empty(temp.path()));
}

#[test]
fn without_stealing_nothing_is_stolen() {
    let (dir, temp) = (files(10), temp());
    let output = meshwork(temp.path())
        .args(["demo", "--headless", "--json", "--nodes", "3", "--no-steal", "--no-latency"])
        .arg(dir.path())
        .output()
        .expect("the binary runs");
    let report = report(&output);
    assert_verified(&report, &output.stderr);
    let counts = (&report["jobs"], &report["stolen"], &report["first_steal_ms"]);
    assert_eq!(counts, (&10.into(), &0.into(), &Value::Null));
}

#[test]
#[cfg(target_os = "linux")]
fn an_unreadable_file_fails_its_job_with_the_reason_and_the_rest_is_verified() {
    let temp = temp();
    // A regular file that can be opened by its owner, and not read from its start.
    let output = meshwork(temp.path())
        .args(["demo", "--headless", "--json", "--nodes", "1", "--no-latency", "/proc/self/mem"])
        .output()
        .expect("the binary runs");
    let report = report(&output);
    assert_eq!(output.status.code(), Some(1));
    assert_verified(&report, &output.stderr);
    assert_eq!((&report["succeeded"], &report["failed"]), (&0.into(), &1.into()));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("failed, 1 job: /proc/self/mem: Input/output error"), "{stderr}");
}

#[test]
fn a_database_is_kept_and_used_again() {
    let (dir, temp) = (files(6), temp());
    let db = temp.path().join("jobs.db");
    for _ in 0..2 {
        let output = meshwork(temp.path())
            .args(["demo", "--headless", "--json", "--nodes", "2", "--no-latency", "--db"])
            .args([&db, &dir.path().to_owned()])
            .output()
            .expect("the binary runs");
        assert_verified(&report(&output), &output.stderr);
        assert_eq!(output.status.code(), Some(0));
    }
    let mut magic = [0; 15];
    fs::File::open(&db).and_then(|mut f| f.read_exact(&mut magic)).expect("the database is there");
    assert_eq!(&magic, b"SQLite format 3");
}

#[test]
fn what_cannot_be_done_is_said_with_the_flag() {
    let (dir, temp) = (files(1), temp());
    let letter = temp.path().join("letter.txt");
    fs::write(&letter, "Dear database, ".repeat(100)).expect("a file");
    let letter_text = letter.display().to_string();
    let empty = temp.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    let empty = empty.display().to_string();
    for (args, code, says) in [
        (&["--nodes", "65"][..], 2, "'--nodes <N>'"),
        (
            &["--kill", "mars"],
            1,
            "--kill: there is no node \"mars\"; there are us-east-1, us-west-2",
        ),
        (&["--kill", "us-east-1", "--nodes", "1"], 1, "--kill: the only node"),
        (&["--out", "/nowhere/out"], 1, "--out: /nowhere/out: No such file"),
        (&["--db", "/nowhere/jobs.db"], 1, "--db: "),
        (&["--db", &letter_text], 1, "--db: "),
    ] {
        let output =
            meshwork(temp.path()).arg("demo").args(args).arg(dir.path()).output().expect("it runs");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    }
    for (path, says) in [
        (&*empty, "holds no regular file"),
        ("/nowhere", "PATH: /nowhere: No such file or directory"),
    ] {
        let output = meshwork(temp.path()).args(["demo", path]).output().expect("it runs");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{path}: {stderr}");
        assert!(stderr.contains(says), "{path}: {stderr}");
    }
    assert_eq!(fs::read(&letter).expect("it is there"), "Dear database, ".repeat(100).as_bytes());
}

/// A run that is in the middle of its work.
struct MidRun {
    parent: Child,
    stderr: BufReader<std::process::ChildStderr>,
    folder: PathBuf,
}

impl MidRun {
    /// Starts a long run and waits until its nodes see each other.
    fn start(temp: &Path, dir: &Path) -> Self {
        let mut parent = meshwork(temp)
            .args(["demo", "--json", "--nodes", "2", "--no-latency", "--jobs", "100000"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut stderr = BufReader::new(parent.stderr.take().expect("stderr is piped"));
        let mut said = String::new();
        while !said.contains("nodes see each other") {
            assert_ne!(stderr.read_line(&mut said).expect("stderr is text"), 0, "{said}");
        }
        let folder = fs::read_dir(temp).expect("it is there").next().expect("a folder");
        Self { parent, stderr, folder: folder.expect("a folder").path() }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.parent);
        kill_process(pid, signal).expect("the parent is there");
    }

    /// A connection to each node: it ends when the node does.
    fn connections(&self) -> Vec<UnixStream> {
        let connect = |name| UnixStream::connect(self.folder.join(name));
        ["us-east-1.sock", "us-west-2.sock"]
            .map(|name| connect(name).expect("the node answers"))
            .into_iter()
            .collect()
    }
}

fn assert_ended(connections: Vec<UnixStream>) {
    for mut connection in connections {
        let mut rest = Vec::new();
        // A reset is an end too.
        let _ = connection.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
}

#[test]
fn an_interrupt_leaves_no_process_and_no_folder() {
    let (dir, temp) = (files(4), temp());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut run = MidRun::start(temp.path(), dir.path());
        let connections = run.connections();
        run.signal(signal);
        let mut rest = String::new();
        run.stderr.read_to_string(&mut rest).expect("stderr is text");
        let status = run.parent.wait().expect("it ends");
        assert_eq!(status.code(), Some(code), "{rest}");
        assert!(!rest.contains("panicked"), "{rest}");
        assert_ended(connections);
        assert!(is_empty(temp.path()));
    }
}

#[test]
fn a_killed_parent_orphans_nobody() {
    let (dir, temp) = (files(4), temp());
    let mut run = MidRun::start(temp.path(), dir.path());
    let connections = run.connections();
    run.signal(Signal::KILL);
    assert_eq!(run.parent.wait().expect("it ends").signal(), Some(9));
    assert_ended(connections);
}

#[test]
fn a_closed_stdout_ends_the_run_quietly() {
    let (dir, temp) = (files(4), temp());
    let mut parent = meshwork(temp.path())
        .args(["demo", "--nodes", "2", "--no-latency", "--jobs", "100000"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut first = String::new();
    let mut stdout = BufReader::new(parent.stdout.take().expect("stdout is piped"));
    stdout.read_line(&mut first).expect("stdout is text");
    assert!(first.starts_with("meshwork "), "{first}");
    drop(stdout);
    let output = parent.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(141), String::new()));
    assert!(is_empty(temp.path()));
}

#[test]
fn a_node_of_the_demo_can_be_looked_at() {
    let (dir, temp) = (files(4), temp());
    let run = MidRun::start(temp.path(), dir.path());
    let socket = run.folder.join("us-east-1.sock");
    let output = meshwork(temp.path())
        .args(["status", "--json", "--socket"])
        .arg(&socket)
        .output()
        .expect("the binary runs");
    let status: Value = serde_json::from_slice(&output.stdout).expect("the status is JSON");
    assert_eq!(
        (&status["id"], status["members"].as_array().map(Vec::len)),
        (&"us-east-1".into(), Some(2))
    );
    run.signal(Signal::INT);
    let mut run = run;
    run.parent.wait().expect("it ends");
}
