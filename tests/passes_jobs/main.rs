//! Jobs whose handlers run in worker processes: what goes wrong there does not go wrong here.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod kinds;
#[path = "../passes_common/mod.rs"]
mod passes_common;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use kinds::{Abort, Fails, Fill, Hang, Panics, Square, Squared};
use meshwork::passes::{PassEvent, PassHost, Passes, PassesBuilder};
use meshwork::prelude::*;
use meshwork::{Followed, JobEvent, MeshBuilder};
use passes_common::{Process, example};
use rustix::process::Signal;

const SOON: Duration = Duration::from_millis(10);

fn passes(directory: &Path) -> PassesBuilder {
    Passes::builder(directory).name("node").no_worker_after(Duration::from_millis(100))
}

/// A node that tries again soon.
fn node(directory: &Path) -> MeshBuilder {
    let options = JobOptions::new().backoff(SOON, SOON);
    Mesh::builder("a")
        .passes(passes(directory))
        .job_in_workers::<Square>(options)
        .job_in_workers::<Abort>(options)
        .job_in_workers::<Hang>(options.timeout(Duration::from_millis(300)))
        .job_in_workers::<Panics>(options)
        .job_in_workers::<Fails>(options)
        .job_in_workers::<Fill>(options)
        .slots(2)
}

struct Workers {
    program: PathBuf,
    directory: PathBuf,
}

impl Workers {
    fn of(directory: &Path) -> Self {
        Self { program: example("passes_jobs_worker"), directory: directory.into() }
    }

    fn start(&self, name: &str) -> Process {
        Process::start(&self.program, &[&self.directory.display().to_string(), "--name", name])
    }
}

/// Awaits that so many workers are there.
async fn joined(mesh: &Mesh, workers: usize) {
    let joined = mesh
        .passes()
        .unwrap()
        .events()
        .filter(|event| std::future::ready(matches!(event, PassEvent::WorkerJoined(_))));
    assert_eq!(joined.take(workers).count().await, workers);
}

/// What failed in each attempt, up to the last.
async fn failures(events: impl Stream<Item = Followed> + Unpin) -> Vec<String> {
    let ends = events.filter_map(|followed| {
        std::future::ready(match followed {
            Followed::Event(JobEvent::Ended { error, recorded, .. }) => Some((error, recorded)),
            _ => None,
        })
    });
    let mut failures = Vec::new();
    let mut ends = std::pin::pin!(ends);
    while let Some((error, recorded)) = ends.next().await {
        failures.extend(error);
        if recorded.is_some() {
            break;
        }
    }
    failures
}

/// Ends the node, and sees that nothing of it is left in the directory.
async fn drained(mesh: Mesh, directory: &Path) {
    let report = mesh.drain(Duration::from_secs(10)).await;
    assert!(report.finished && report.retired, "{report:?}");
    assert_eq!(report.released, 0);
    drop(mesh);
    // The collector thread may be the last that has the client; it looks every 100 ms.
    while !PassHost::look(directory).unwrap().clients.is_empty() {
        tokio::task::yield_now().await;
    }
}

#[actix::test]
async fn a_job_runs_in_another_process_and_its_result_is_typed() {
    let directory = tempfile::tempdir().unwrap();
    let mesh = node(directory.path()).start().await.unwrap();
    let worker = Workers::of(directory.path()).start("w");
    joined(&mesh, 1).await;
    let ticket = mesh.enqueue(Enqueue::new(&Square(12))).await.unwrap();
    let outcome = mesh.outcome(&ticket).await;
    assert_eq!(outcome, Outcome::Succeeded(Squared { square: 144, pid: worker.pid() }));

    // Up to what a pass carries, and not a byte is lost; over that, it is told.
    let ticket = mesh.enqueue(Enqueue::new(&Fill { bytes: 60_000 })).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded("x".repeat(60_000)));
    let ticket = mesh.enqueue(Enqueue::new(&Fill { bytes: 70_000 })).await.unwrap();
    let Outcome::Failed { error, attempts: 1 } = mesh.outcome(&ticket).await else { panic!() };
    assert!(
        error.starts_with("the result has 70")
            && error.ends_with("the passes of this machine carry"),
        "{error}"
    );
    drained(mesh, directory.path()).await;
}

#[actix::test]
async fn a_handler_that_aborts_its_process_is_tried_again_and_the_node_lives() {
    let directory = tempfile::tempdir().unwrap();
    let mesh = node(directory.path()).start().await.unwrap();
    let workers = Workers::of(directory.path());
    let mut processes = ["w1", "w2", "w3"].map(|name| workers.start(name));
    joined(&mesh, 3).await;
    let events = mesh.job_events(64);
    let ticket = mesh.enqueue(Enqueue::new(&Abort { times: 2 })).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(3));
    assert_eq!(failures(events).await, ["the worker process died while it ran the job"; 2]);

    // With no attempt left it has failed, and says why.
    let ticket = mesh.enqueue(Enqueue::new(&Abort { times: 9 }).max_attempts(1)).await.unwrap();
    let error = "the worker process died while it ran the job".into();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Failed { error, attempts: 1 });
    for process in &mut processes {
        assert_eq!(process.ended().0.signal(), Some(Signal::ABORT.as_raw()));
    }
    drained(mesh, directory.path()).await;
}

#[actix::test]
async fn an_attempt_past_its_time_takes_its_worker_with_it_and_runs_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let mesh = node(directory.path()).start().await.unwrap();
    let workers = Workers::of(directory.path());
    let mut processes = ["w1", "w2"].map(|name| workers.start(name));
    joined(&mesh, 2).await;
    let ticket = mesh.enqueue(Enqueue::new(&Hang)).await.unwrap();
    let survivor = mesh.outcome(&ticket).await.succeeded().unwrap();
    let dead = processes.iter_mut().find(|process| process.pid() != survivor).unwrap();
    assert_eq!(dead.ended().0.signal(), Some(Signal::KILL.as_raw()));
    drained(mesh, directory.path()).await;
}

#[actix::test]
async fn what_a_handler_says_decides_whether_it_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let mesh = node(directory.path()).start().await.unwrap();
    let mut worker = Workers::of(directory.path()).start("w");
    joined(&mesh, 1).await;

    let events = mesh.job_events(64);
    let ticket = mesh.enqueue(Enqueue::new(&Fails)).await.unwrap();
    let failed = |error: &str, attempts| Outcome::Failed { error: error.into(), attempts };
    assert_eq!(mesh.outcome(&ticket).await, failed("not ever", 2));
    assert_eq!(failures(events).await, ["not yet", "not ever"]);

    // Both are bugs, which no attempt mends.
    let ticket = mesh.enqueue(Enqueue::new(&Panics)).await.unwrap();
    let Outcome::Failed { error, attempts: 1 } = mesh.outcome(&ticket).await else { panic!() };
    assert!(error.contains("no such luck"), "{error}");
    let ticket = mesh.enqueue(Enqueue::new(&Careless("twelve".into()))).await.unwrap();
    let Outcome::Failed { error, attempts: 1 } = mesh.outcome(&ticket).await else { panic!() };
    assert!(error.contains("invalid type: string \"twelve\", expected u64"), "{error}");

    // And the worker is none the worse for it.
    let ticket = mesh.enqueue(Enqueue::new(&Square(3))).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await.succeeded().unwrap().pid, worker.pid());
    drained(mesh, directory.path()).await;
    worker.send(Signal::TERM);
    assert!(worker.ended().0.success());
}

/// What a careless client of another language may enqueue as a [`Square`].
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Careless(String);

impl Job for Careless {
    const NAME: &'static str = Square::NAME;
    type Output = Squared;
}

#[actix::test]
async fn a_job_waits_for_a_worker_by_its_retries() {
    let directory = tempfile::tempdir().unwrap();
    let mesh = node(directory.path()).start().await.unwrap();
    let mut events = mesh.job_events(1_024);
    let job = Enqueue::new(&Square(5)).max_attempts(1_000);
    let ticket = mesh.enqueue(job).await.unwrap();
    let error = loop {
        if let Followed::Event(JobEvent::Ended { error, .. }) = events.next().await.unwrap() {
            break error.unwrap();
        }
    };
    assert_eq!(error, "no worker process of this machine has the handler");
    let worker = Workers::of(directory.path()).start("late");
    let outcome = mesh.outcome(&ticket).await;
    assert_eq!(outcome, Outcome::Succeeded(Squared { square: 25, pid: worker.pid() }));
    drained(mesh, directory.path()).await;
}

#[actix::test]
async fn handlers_in_workers_need_passes() {
    let builder = Mesh::builder("a").job_in_workers::<Square>(JobOptions::new());
    let error = builder.start().await.unwrap_err();
    assert!(matches!(error, StartError::NoPasses(_)));
    assert_eq!(
        error.to_string(),
        "handler `square` runs in worker processes: give the builder .passes(..) too"
    );
}

#[actix::test]
async fn a_node_that_does_not_start_leaves_no_one_in_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let twice = node(directory.path()).job_in_workers::<Square>(JobOptions::new());
    let error = twice.start().await.unwrap_err();
    assert_eq!(error.to_string(), "handler `square` is registered twice");
    let left = PassHost::look(directory.path()).unwrap();
    assert_eq!((left.workers, left.clients), (vec![], vec![]));

    let nowhere = Mesh::builder("a").passes(passes(Path::new("/dev/null/passes")));
    let error = nowhere.start().await.unwrap_err();
    assert!(
        error.to_string().starts_with("cannot make the directory /dev/null/passes: "),
        "{error}"
    );
}
