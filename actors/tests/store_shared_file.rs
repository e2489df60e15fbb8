//! One SQLite file under several processes: this program again, as `child`.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod store_common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use actix::prelude::*;
use futures_util::future::join_all;
use meshwork_actors::store::messages::*;
use meshwork_actors::store::sqlite::{SqliteOptions, SqliteStore};
use meshwork_protocol::id::{JobId, Owner};
use meshwork_protocol::job::JobState;
use rusqlite::Connection;

use store_common::*;

/// What a child does, on which file, under which name; by the environment, since the arguments are
/// the test harness's.
const ROLE: &str = "STORE_TEST_ROLE";
const FILE: &str = "STORE_TEST_FILE";
const NAME: &str = "STORE_TEST_NAME";

/// Callers that ask at once in each process that is to be saturated.
const CALLERS: usize = 32;

/// A process that does as it is told by lines, and answers in lines that begin with `> `.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: &str, file: &Path, name: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["child", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(FILE, file)
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, lines }
    }

    /// Lets it begin, once all are ready.
    fn go(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    /// Lets it end.
    fn end(&mut self) {
        self.stdin = None;
    }

    /// The next line that it says; `None` when it has ended.
    fn next(&mut self) -> Option<String> {
        self.lines.find_map(|line| Some(line.ok()?.split_once("> ")?.1.to_owned()))
    }

    fn expect(&mut self, line: &str) {
        assert_eq!(self.next().as_deref(), Some(line));
    }

    fn expect_success(mut self) {
        self.stdin = None;
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: impl std::fmt::Display) {
    println!("> {line}");
    io::stdout().flush().unwrap();
}

/// In memory where that can be: on a disk that others write to, a sync may take seconds, and who gets
/// a turn meanwhile says nothing.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

fn wait_for_go() {
    say("ready");
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
}

#[test]
#[ignore = "a process of the tests beside it"]
fn child() {
    let role = env::var(ROLE).expect("started by a test");
    let path = PathBuf::from(env::var_os(FILE).unwrap());
    let name = env::var(NAME).unwrap();
    System::new().block_on(async {
        match role.as_str() {
            "open" => open_and_register(&path, &name).await,
            "claim" => claim_all(&path, &name).await,
            "saturate" => saturate(&path, &name).await,
            "work" => work_until_killed(&path, &name).await,
            role => panic!("unknown role {role}"),
        }
    });
}

fn integrity(path: &Path) -> String {
    let connection = Connection::open(path).unwrap();
    connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap()
}

#[test]
fn ten_processes_make_one_database() {
    let folder = folder();
    for round in 0..3 {
        let path = folder.path().join(format!("{round}.db"));
        if round > 0 {
            fs::write(&path, b"").unwrap();
        }
        let mut processes: Vec<_> =
            (0..10).map(|n| Process::start("open", &path, &format!("n{n}"))).collect();
        processes.iter_mut().for_each(|process| process.expect("ready"));
        processes.iter_mut().for_each(Process::go);
        processes.iter_mut().for_each(|process| process.expect("generation 1"));
        processes.into_iter().for_each(Process::expect_success);
        assert_eq!(integrity(&path), "ok");
        let nodes: i64 = Connection::open(&path)
            .unwrap()
            .query_row("SELECT count(*) FROM nodes WHERE reaped = 0", [], |row| row.get(0))
            .unwrap();
        assert_eq!(nodes, 10);
    }
}

async fn open_and_register(path: &Path, name: &str) {
    wait_for_go();
    let store = SqliteStore::open(path, &SqliteOptions::default()).unwrap().start();
    let at_least = meshwork_protocol::id::Generation(1);
    let registered = store
        .send(Register { node: node(name), at_least, gossip: None, over: None })
        .await
        .unwrap()
        .unwrap();
    say(format_args!("generation {}", registered.generation));
}

#[test]
fn jobs_raced_for_by_processes_are_each_claimed_once() {
    const JOBS: u64 = 2_000;
    let folder = folder();
    let path = folder.path().join("jobs.db");
    System::new().block_on(async {
        let (store, arbiter) = start_sqlite(&path, &SqliteOptions::default());
        let jobs = (0..JOBS).map(|n| unclaimed(spec(n), ["p0", "p1", "x"][n as usize % 3]));
        insert(&store, &owner("seeder", 1), jobs.collect()).await;
        ask(&store, Close).await;
        arbiter.stop();
    });

    let mut processes: Vec<_> =
        (0..4).map(|n| Process::start("claim", &path, &format!("p{n}"))).collect();
    processes.iter_mut().for_each(|process| process.expect("ready"));
    processes.iter_mut().for_each(Process::go);
    let mut claims = BTreeMap::<JobId, Vec<usize>>::new();
    for (n, process) in processes.iter_mut().enumerate() {
        while let Some(line) = process.next().filter(|line| line != "done") {
            claims.entry(line.parse().unwrap()).or_default().push(n);
        }
    }
    processes.into_iter().for_each(Process::expect_success);
    let twice: Vec<_> = claims.iter().filter(|(_, by)| by.len() > 1).collect();
    assert!(twice.is_empty(), "claimed more than once: {twice:?}");
    assert_eq!(claims.len() as u64, JOBS);
    let tokens: i64 = Connection::open(&path)
        .unwrap()
        .query_row("SELECT count(*) FROM job WHERE token = 1 AND state = 'claimed'", [], |row| {
            row.get(0)
        })
        .unwrap();
    assert_eq!(tokens as u64, JOBS);
}

async fn claim_all(path: &Path, name: &str) {
    let (store, arbiter) = start_sqlite(path, &SqliteOptions::default());
    let [me] = register(&store, [name]).await;
    wait_for_go();
    loop {
        let claimed = claim_due(&store, &me, 7).await;
        if claimed.is_empty() {
            break;
        }
        claimed.iter().for_each(|job| say(job.spec.id));
    }
    say("done");
    arbiter.stop();
}

#[test]
fn five_saturated_processes_all_get_their_turns() {
    share_a_file(5, 15_000, 0.35);
}

#[test]
fn two_saturated_processes_share_evenly() {
    share_a_file(2, 30_000, 0.5);
}

/// Lets `count` processes insert as fast as they can until each has inserted `jobs`. Then each must
/// have at least `share` of an even part of what was inserted meanwhile, and must not have waited for
/// a long row of the others' jobs.
fn share_a_file(count: usize, jobs: u64, share: f64) {
    let folder = folder();
    let path = folder.path().join("jobs.db");
    let mut processes: Vec<_> =
        (0..count).map(|n| Process::start("saturate", &path, &format!("p{n}"))).collect();
    processes.iter_mut().for_each(|process| process.expect("ready"));
    processes.iter_mut().for_each(Process::go);

    // The children say when they have inserted another hundred.
    let done: Vec<_> = (0..count).map(|_| AtomicU64::new(0)).collect();
    let enough = AtomicBool::new(false);
    let reports = thread::scope(|scope| {
        let (done, enough) = (&done, &enough);
        let readers: Vec<_> = processes
            .iter_mut()
            .enumerate()
            .map(|(n, process)| {
                scope.spawn(move || {
                    while let Some(line) = process.next() {
                        if line != "hundred" {
                            return Some(line);
                        }
                        done[n].fetch_add(100, Ordering::Relaxed);
                        if done.iter().all(|done| done.load(Ordering::Relaxed) >= jobs) {
                            enough.store(true, Ordering::Relaxed);
                        }
                        if enough.load(Ordering::Relaxed) {
                            process.end();
                        }
                    }
                    // It has failed, and the others are not to wait for it.
                    enough.store(true, Ordering::Relaxed);
                    None
                })
            })
            .collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(reports.iter().all(Option::is_some), "a process ended without a report");
    println!("{count} processes: {reports:#?}");

    let connection = Connection::open(&path).unwrap();
    let mut statement = connection.prepare("SELECT origin FROM jobs ORDER BY seq").unwrap();
    let order: Vec<String> =
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    // From the time that all were there until the first had ended.
    let names: Vec<_> = (0..count).map(|n| format!("p{n}")).collect();
    let at = |name| order.iter().position(|origin| origin == name).unwrap();
    let end = |name| order.iter().rposition(|origin| origin == name).unwrap();
    let from = names.iter().map(at).max().unwrap();
    let to = names.iter().map(end).min().unwrap();
    let order = &order[from..=to];
    for name in &names {
        let own = order.iter().filter(|origin| *origin == name).count() as f64;
        let even = order.len() as f64 / count as f64;
        assert!(own >= share * even, "{name} inserted {own} of {}", order.len());
        let longest = order.split(|origin| origin == name).map(<[_]>::len).max().unwrap();
        println!("{name}: {own} of {}, waited for at most {longest} jobs of others", order.len());
        assert!(longest < order.len() / 4, "{name} waited for {longest} of {}", order.len());
    }
}

async fn saturate(path: &Path, name: &str) {
    let (store, arbiter) = start_sqlite(path, &SqliteOptions::default());
    let [me] = register(&store, [name]).await;
    let salt = name.bytes().fold(0, |salt, byte| salt * 256 + u64::from(byte)) << 32;
    wait_for_go();
    let ended = Arc::new(AtomicBool::new(false));
    let end = ended.clone();
    thread::spawn(move || {
        let _ = io::stdin().read(&mut [0]);
        end.store(true, Ordering::Relaxed);
    });
    let inserted = AtomicU64::new(0);
    let longest_us = AtomicU64::new(0);
    let begun = Instant::now();
    let caller = async || {
        while !ended.load(Ordering::Relaxed) {
            let n = inserted.fetch_add(1, Ordering::Relaxed);
            let mut job = unclaimed(spec(salt + n), name);
            Arc::get_mut(&mut job.spec).unwrap().origin = me.node.clone();
            let asked = Instant::now();
            insert(&store, &me, vec![job]).await;
            longest_us.fetch_max(asked.elapsed().as_micros() as u64, Ordering::Relaxed);
            if (n + 1).is_multiple_of(100) {
                say("hundred");
            }
        }
    };
    join_all((0..CALLERS).map(|_| caller())).await;
    let longest = Duration::from_micros(longest_us.into_inner());
    say(format_args!(
        "{name}: {} jobs in {:?}, the longest wait {longest:?}",
        inserted.into_inner(),
        begun.elapsed()
    ));
    arbiter.stop();
}

/// What was answered is in the file, however the process ends.
#[test]
fn what_was_answered_survives_a_kill() {
    let folder = folder();
    let path = folder.path().join("jobs.db");
    let mut answered = BTreeMap::<JobId, JobState>::new();
    for round in 0..4 {
        let mut process = Process::start("work", &path, &format!("{round}"));
        process.expect("ready");
        process.go();
        for _ in 0..(150 + 97 * round) {
            note(&mut answered, &process.next().unwrap());
        }
        process.child.kill().unwrap();
        // What it had said before it died was answered too; the last line may be cut.
        while let Some(line) = process.next() {
            note(&mut answered, &line);
        }
        drop(process);

        assert_eq!(integrity(&path), "ok");
        System::new().block_on(async {
            let (store, arbiter) = start_sqlite(&path, &SqliteOptions::default());
            let jobs: Vec<_> = answered.keys().copied().collect();
            let rows = ask(&store, Lookup { jobs: jobs.clone() }).await.unwrap();
            let found: Vec<_> = rows.iter().map(|row| row.id).collect();
            assert_eq!(found, jobs, "every answered insert is there");
            for row in rows {
                let said = answered[&row.id];
                assert!(
                    progress(row.state) >= progress(said),
                    "{}: {said} was answered, {} is stored",
                    row.id,
                    row.state
                );
            }
            ask(&store, Close).await;
            arbiter.stop();
        });
    }
}

fn note(answered: &mut BTreeMap<JobId, JobState>, line: &str) {
    let Some((state, id)) = line.split_once(' ') else { return };
    let state = JobState::ALL.into_iter().find(|s| s.name() == state);
    if let (Some(state), Ok(id)) = (state, id.parse()) {
        answered.insert(id, state);
    }
}

/// How far a job has come that never fails.
fn progress(state: JobState) -> usize {
    let order = [JobState::Queued, JobState::Claimed, JobState::Running, JobState::Succeeded];
    order.iter().position(|s| *s == state).expect("no other state occurs")
}

async fn work_until_killed(path: &Path, name: &str) {
    let (store, _arbiter) = start_sqlite(path, &SqliteOptions::default());
    let [me] = register(&store, [name]).await;
    wait_for_go();
    let salt = (name.parse::<u64>().unwrap() + 1) << 32;
    join_all((0..8).map(|k| work(&store, &me, salt + (k << 24)))).await;
}

async fn work(store: &StoreHandle, me: &Owner, salt: u64) {
    for n in salt.. {
        insert(store, me, vec![unclaimed(spec(n), me.node.as_str())]).await;
        say(format_args!("queued {}", id(n)));
        for job in claim_due(store, me, 1).await {
            say(format_args!("claimed {}", job.spec.id));
            start(store, me, vec![job.claim()]).await;
            say(format_args!("running {}", job.spec.id));
            let disposition = meshwork_protocol::job::Disposition::Succeeded("1".into());
            finish(store, vec![Ended { claim: job.claim(), disposition }]).await;
            say(format_args!("succeeded {}", job.spec.id));
        }
    }
}
