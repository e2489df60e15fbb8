//! `meshwork passes`, as an operator meets it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod passes_common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};

use meshwork::passes::{
    ClientOptions, Pass, PassClient, PassHost, PassRegistry, WorkerOptions, WorkerThread,
};
use passes_common::hold;
use serde_json::{Value, json};

fn meshwork(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshwork"));
    command.arg("passes").args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// The exit status, stdout and stderr.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let output = meshwork(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A worker that runs `echo`, and `hold` until it is let go; and a client.
struct Live {
    _worker: WorkerThread,
    client: PassClient,
    begun: mpsc::Receiver<()>,
    go: mpsc::Sender<()>,
}

fn live(directory: &Path) -> Live {
    let host: Arc<PassHost> = PassHost::open(directory, None).unwrap();
    let registry = PassRegistry::new();
    registry.register("echo", |call| Ok::<_, String>(call.args.to_vec())).unwrap();
    let (begun, go) = hold(&registry);
    let options = WorkerOptions { name: "w".into(), ..Default::default() };
    let _worker = WorkerThread::spawn(&host, registry, &options).unwrap();
    let options = ClientOptions { name: "c".into(), ..Default::default() };
    let client = PassClient::join(&host, options).unwrap();
    Live { _worker, client, begun, go }
}

fn echoes(client: &PassClient, count: usize) {
    for _ in 0..count {
        client.submit(&Pass::named("echo", b"".as_slice())).unwrap();
    }
    let mut ended = 0;
    while ended < count {
        ended += client.poll(|_| {});
    }
}

#[test]
fn a_live_directory_is_shown_to_people_and_to_programs() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().display().to_string();
    let live = live(folder.path());
    echoes(&live.client, 5);
    live.client.submit(&Pass::named("hold", b"".as_slice())).unwrap();
    live.begun.recv().unwrap();
    live.client.submit(&Pass::named("echo", b"".as_slice())).unwrap();

    let (status, said, errors) = run(&[&directory, "--json", "--interval", "10"]);
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    assert_eq!(said.lines().count(), 1);
    let mut said: Value = serde_json::from_str(&said).unwrap();
    let pid = std::process::id();
    for volatile in ["/workers/0/up_us", "/clients/0/up_us", "/taken_us"] {
        let value = said.pointer_mut(volatile).unwrap();
        assert!(value.as_u64() > Some(0), "{volatile}: {value}");
        *value = json!("some");
    }
    let slot = &said["workers"][0]["running"]["pass"]["slot"];
    let generation = &said["workers"][0]["running"]["pass"]["generation"];
    let expected = json!({
        "directory": directory,
        "taken_us": "some",
        "geometry":
            {"clients": 16, "slots_per_client": 512, "workers": 64, "payload_bytes": 65_536},
        "workers": [{
            "worker": 0, "epoch": 1, "name": "w", "pid": pid, "state": "alive", "up_us": "some",
            "finished": 5, "runs": ["echo", "hold"],
            "running": {
                "pass": {"slot": slot, "generation": generation},
                "closure": "hold", "attempt": 0, "left_us": null,
            },
        }],
        "clients": [{
            "client": 0, "epoch": 1, "name": "c", "pid": pid, "state": "alive", "up_us": "some",
            "first_slot": 0, "slots": 512, "in_flight": {"ready": 1, "claimed": 1, "done": 0},
            "collected": 5,
        }],
        "in_flight": {"ready": 1, "claimed": 1, "done": 0},
        "counters": {"requeued": 0, "poisoned": 0, "adopted": 0, "orphaned": 0},
        "rates": {"finished_per_s": 0.0, "collected_per_s": 0.0},
    });
    assert_eq!(said, expected);

    let (status, said, errors) = run(&[&directory]);
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(
        lines[0],
        format!("{directory}: at most 64 workers, 16 clients of 512 slots, 64 KiB a payload")
    );
    assert_eq!(
        lines[6].split_whitespace().take(3).collect::<Vec<_>>(),
        ["0", "c", &pid.to_string()]
    );
    assert_eq!(lines[8], "in flight: 1 ready, 1 claimed, 0 done");
    live.go.send(()).unwrap();
}

#[test]
fn a_watcher_sees_passes_go_by_and_the_directory_go() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("passes").display().to_string();
    let live = live(directory.as_ref());
    let mut watch = meshwork(&[&directory, "--watch", "--json", "--interval", "20"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || -> Option<Value> {
        lines.next().map(|line| serde_json::from_str(&line.unwrap()).unwrap())
    };
    assert_eq!(next().unwrap()["rates"]["finished_per_s"], 0.0);
    echoes(&live.client, 100);
    let mut rates = Vec::new();
    while rates.last().is_none_or(|last: &Value| last["collected"] != 100) {
        let said = next().unwrap();
        rates.push(json!({
            "collected": said["clients"][0]["collected"],
            "finished_per_s": said["rates"]["finished_per_s"],
            "collected_per_s": said["rates"]["collected_per_s"],
        }));
    }
    for rate in ["finished_per_s", "collected_per_s"] {
        assert!(rates.iter().any(|said| said[rate].as_f64() > Some(0.0)), "{rates:?}");
    }
    drop(live);
    fs::remove_dir_all(&directory).unwrap();
    while next().is_some() {}
    let output = watch.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        format!(
            "error: no passes at {directory}: there is no such directory; name the one that the \
             processes open\n"
        )
    );
}

#[test]
fn a_reader_that_goes_away_ends_the_watch() {
    let folder = tempfile::tempdir().unwrap();
    let _live = live(folder.path());
    let directory = folder.path().display().to_string();
    let mut watch = meshwork(&[&directory, "--watch", "--interval", "10"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(watch.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with(&directory), "{line}");
    drop(stdout);
    assert_eq!(watch.wait().unwrap().code(), Some(0));
}

#[test]
fn what_cannot_be_shown_is_told_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let (gone, empty, letter, torn) =
        (place("gone"), place("empty"), place("letter"), place("torn"));
    fs::create_dir(&empty).unwrap();
    fs::write(&letter, "Dear passes,").unwrap();
    fs::create_dir(&torn).unwrap();
    let map = Path::new(&torn).join("passes.map");
    let mut random = vec![0; 10_000];
    fastrand::Rng::with_seed(7).fill(&mut random);
    fs::write(&map, &random).unwrap();
    let map = map.display();
    for (args, code, says) in [
        (&[][..], 2, "<DIR>".into()),
        (&[&gone, "--interval", "9"], 2, "'--interval <MS>'".into()),
        (&[&gone, "--interval", "-5"], 2, "'--interval <MS>'".into()),
        (&[&gone, &empty], 2, "unexpected argument".into()),
        (&[&gone, "--frobnicate"], 2, "'--frobnicate'".into()),
        (&[&gone], 1, format!("error: no passes at {gone}: there is no such directory;")),
        (
            &[&empty],
            1,
            format!(
                "error: no passes at {empty}: no process has opened the directory for passes yet"
            ),
        ),
        (&[&letter], 1, format!("error: cannot open {letter}/passes.map: Not a directory")),
        (
            &[&torn],
            1,
            format!(
                "error: {map}: the file is no pass file: it does not begin with the magic; stop \
                 every process that uses it, and remove it"
            ),
        ),
    ] {
        let (status, said, errors) = run(args);
        assert_eq!((status, said.as_str()), (Some(code), ""), "{args:?}: {errors}");
        assert!(errors.contains(&says), "{args:?}: {errors}");
    }
    assert!(!Path::new(&gone).exists());
    assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(fs::read_dir(&torn).unwrap().count(), 1);
    let (status, help, _) = run(&["--help"]);
    assert_eq!(status, Some(0));
    assert!(help.contains("--watch") && help.contains("Examples:"), "{help}");
}
