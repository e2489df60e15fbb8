//! One node and its user: jobs, outcomes, and what goes wrong.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use meshwork::prelude::*;
use meshwork::{JobState, OutcomeError};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Add(u64, u64);

impl Job for Add {
    const NAME: &'static str = "add";
    type Output = u64;
}

struct Offset(u64);

async fn add(Add(a, b): Add, offset: Data<Offset>, cx: JobContext) -> Result<u64, JobError> {
    assert_eq!(cx.node().as_str(), "worker-1");
    // A handler's future need not be Send.
    let sum = Rc::new(Cell::new(a + b));
    tokio::task::yield_now().await;
    Ok(sum.get() + offset.0)
}

#[derive(Serialize, Deserialize)]
struct Misbehave(String);

impl Job for Misbehave {
    const NAME: &'static str = "misbehave";
    type Output = String;
}

async fn misbehave(Misbehave(how): Misbehave, cx: JobContext) -> Result<String, JobError> {
    match how.as_str() {
        "panic" => panic!("as asked"),
        "permanent" => Err(JobError::permanent("no use")),
        "retry" if cx.attempt() < 3 => Err(JobError::retry("not yet")),
        "question mark" if cx.attempt() == 1 => {
            let n: u32 = "x".parse()?;
            Ok(n.to_string())
        }
        "hang" => std::future::pending().await,
        how => Ok(format!("{how} on attempt {}", cx.attempt())),
    }
}

fn worker() -> meshwork::MeshBuilder {
    let quick = JobOptions::new()
        .timeout(Duration::from_millis(50))
        .backoff(Duration::from_millis(1), Duration::from_millis(5));
    Mesh::builder("worker-1").slots(4).data(Offset(100)).job(add).job_with(misbehave, quick)
}

async fn outcome_of(mesh: &Mesh, how: &str) -> Outcome<String> {
    let ticket = mesh.enqueue(Enqueue::new(&Misbehave(how.into()))).await.unwrap();
    mesh.outcome(&ticket).await
}

fn failed(error: &str, attempts: u32) -> Outcome<String> {
    Outcome::Failed { error: error.into(), attempts }
}

#[actix::test]
async fn a_job_comes_to_its_outcome_by_either_way_in() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::sqlite(folder.path().join("jobs.db"));
    let mesh = worker().store(store).start().await.unwrap();
    let ticket = mesh.enqueue(Enqueue::new(&Add(1, 2))).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(103));
    let ticket = mesh.deque().send(Enqueue::new(&Add(3, 4)).key("k")).await.unwrap().unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(107));
    let late = Ticket::<Add>::of(ticket.id());
    assert_eq!(mesh.outcome(&late).await, Outcome::Succeeded(107), "an outcome can be asked again");
    assert_eq!(mesh.counts().await.unwrap().of(JobState::Succeeded), 2);
    let report = mesh.drain(Duration::from_secs(5)).await;
    assert!(report.finished && report.retired, "{report:?}");
    assert_eq!(mesh.stopped().await, StopReason::Drained);
    assert!(matches!(mesh.enqueue(Enqueue::new(&Add(1, 1))).await, Err(EnqueueError::Stopping)));
}

#[actix::test]
async fn failures_are_final_or_repeated_as_the_handler_says() {
    let mesh = worker().start().await.unwrap();
    assert_eq!(outcome_of(&mesh, "panic").await, failed("handler panicked: as asked", 1));
    assert_eq!(outcome_of(&mesh, "permanent").await, failed("no use", 1));
    assert_eq!(
        outcome_of(&mesh, "retry").await,
        Outcome::Succeeded("retry on attempt 3".into()),
        "the node lives on after a panic"
    );
    assert_eq!(
        outcome_of(&mesh, "question mark").await,
        Outcome::Succeeded("question mark on attempt 2".into())
    );
    let hang = Enqueue::new(&Misbehave("hang".into())).max_attempts(2);
    let ticket = mesh.enqueue(hang).await.unwrap();
    assert_eq!(
        mesh.outcome(&ticket).await,
        failed("handler timed out after 50ms (attempt 2 of 2)", 2)
    );
    mesh.drain(Duration::from_secs(5)).await;
}

#[derive(Serialize, Deserialize)]
struct AddText(String);

impl Job for AddText {
    const NAME: &'static str = Add::NAME;
    type Output = u64;
}

#[derive(Serialize, Deserialize)]
struct Unheard;

impl Job for Unheard {
    const NAME: &'static str = "unheard";
    type Output = ();
}

#[actix::test]
async fn what_cannot_run_is_refused_or_fails_without_a_retry() {
    let mesh = worker().start().await.unwrap();
    let error = mesh.enqueue(Enqueue::new(&Unheard)).await.unwrap_err();
    assert!(error.to_string().contains("no handler `unheard`"), "{error}");
    assert!(!error.is_retryable());
    let ticket = mesh.enqueue(Enqueue::new(&AddText("one".into()))).await.unwrap();
    let outcome = mesh.outcome(&ticket).await;
    let Outcome::Failed { error, attempts: 1 } = outcome else {
        panic!("bad arguments fail at the first attempt: {outcome:?}");
    };
    assert!(error.starts_with("arguments do not decode: "), "{error}");
    let nobody = Ticket::<Add>::of(meshwork::JobId::from_bytes([7; 16]));
    assert_eq!(mesh.outcome(&nobody).await, Outcome::Unknown(OutcomeError::NoSuchJob));
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn the_same_enqueue_sent_twice_stores_one_job() {
    let mesh = worker().start().await.unwrap();
    let enqueue = Enqueue::new(&Add(1, 1));
    let first = mesh.enqueue(enqueue.clone()).await.unwrap();
    let second = mesh.enqueue(enqueue).await.unwrap();
    assert_eq!(first.id(), second.id());
    assert!(!first.is_duplicate() && second.is_duplicate());
    assert_eq!(mesh.outcome(&second).await, Outcome::Succeeded(102));
    assert_eq!(mesh.counts().await.unwrap().total(), 1);
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_scheduled_job_runs_when_it_is_due_and_not_before() {
    let mesh = worker().start().await.unwrap();
    let before = std::time::Instant::now();
    let delay = Duration::from_millis(120);
    let ticket = mesh.enqueue(Enqueue::new(&Add(0, 0)).run_after(delay)).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(100));
    assert!(before.elapsed() >= delay - Duration::from_millis(1));
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_flood_is_done_to_the_last_job() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = worker().store(Store::sqlite(folder.path().join("jobs.db"))).start().await.unwrap();
    let requests: Vec<_> =
        (0..2_000).map(|n| Enqueue::new(&Add(n, 0)).into_request().unwrap()).collect();
    let accepted = mesh.enqueue_batch(requests).await.unwrap();
    for (n, accepted) in accepted.iter().enumerate() {
        let ticket = Ticket::<Add>::of(accepted.id);
        assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(n as u64 + 100));
    }
    let counts = mesh.counts().await.unwrap();
    assert_eq!((counts.of(JobState::Succeeded), counts.total()), (2_000, 2_000));
    assert_eq!(mesh.metrics().jobs_started, 2_000);
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_handler_without_its_data_is_found_when_the_node_starts() {
    let error = Mesh::builder("worker-1").job(add).start().await.unwrap_err();
    assert!(error.to_string().contains("takes Data<node::Offset>"), "{error}");
    let error = worker().job(add).start().await.unwrap_err();
    assert_eq!(error.to_string(), "handler `add` is registered twice");
}

#[test]
fn starting_without_a_system_says_what_to_do() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(worker().start()).unwrap_err();
    assert!(matches!(error, StartError::NoSystem), "{error}");
    let outcome = runtime.block_on(async {
        let mesh = worker().start_on_own_thread().await.unwrap();
        let ticket = mesh.enqueue(Enqueue::new(&Add(1, 2))).await.unwrap();
        let outcome = mesh.outcome(&ticket).await;
        mesh.drain(Duration::from_secs(5)).await;
        outcome
    });
    assert_eq!(outcome, Outcome::Succeeded(103));
}

#[actix::test]
async fn starting_on_a_worker_thread_of_the_system_says_what_to_do() {
    let arbiter = actix::Arbiter::new();
    let (sender, receiver) = tokio::sync::oneshot::channel();
    arbiter.spawn_fn(move || {
        actix::spawn(async move {
            let error = worker().start().await.unwrap_err();
            sender.send(error.to_string()).unwrap();
        });
    });
    let error = receiver.await.unwrap();
    assert!(error.contains("HttpServer::new"), "{error}");
}

#[actix::test]
async fn a_port_in_use_is_named() {
    let mesh = worker().start().await.unwrap();
    let taken = mesh.gossip_addr();
    let error =
        Mesh::builder("worker-2").bind(taken.to_string()).start().await.unwrap_err().to_string();
    assert!(error.starts_with(&format!("bind {taken}: the address is in use")), "{error}");
    mesh.drain(Duration::from_secs(5)).await;
}
