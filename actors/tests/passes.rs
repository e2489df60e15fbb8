//! Passes within one process: submitted, run, collected, on the real file with real locks.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use meshwork_actors::host::pass::{Completion, Pass, PassOutcome, SubmitError};
use meshwork_actors::host::pass_client::{ClientOptions, PassClient};
use meshwork_actors::host::pass_host::PassHost;
use meshwork_actors::host::registry::PassRegistry;
use meshwork_actors::host::worker_thread::{WorkerOptions, WorkerThread};
use meshwork_protocol::pass::layout::Geometry;

fn open(directory: &Path) -> Arc<PassHost> {
    let geometry = Geometry { clients: 4, slots_per_client: 64, ..Geometry::default() };
    PassHost::open(directory, Some(geometry)).unwrap()
}

fn registry() -> PassRegistry {
    let registry = PassRegistry::new();
    registry.register("echo", |call| Ok::<_, String>(call.args.to_vec())).unwrap();
    registry.register("fail", |_| Err::<Vec<u8>, _>("no such image")).unwrap();
    registry
        .register("panic", |call| {
            assert!(call.args.len() > 1_000, "too few");
            Ok::<_, String>(vec![])
        })
        .unwrap();
    registry.register("long", |call| Ok::<_, String>(vec![7; call.args.len() + 1])).unwrap();
    registry
}

fn named(name: &str) -> ClientOptions {
    ClientOptions { name: name.into(), ..ClientOptions::default() }
}

fn next(client: &PassClient) -> Completion<'static> {
    let mut one = None;
    while one.is_none() {
        assert!(client.poll(|end| one = Some(end.into_owned())) <= 1);
    }
    one.unwrap()
}

#[test]
fn arguments_and_results_of_every_size_come_whole() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let client = PassClient::join(&host, named("sizes")).unwrap();
    for bytes in [0, 1, 47, 48, 49, 4_095, 4_096, 65_535, 65_536] {
        let args: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
        let pass = Pass::named("echo", &args).tag(bytes as u64);
        let id = client.submit(&pass).unwrap();
        let end = next(&client);
        assert_eq!((end.pass, end.tag, end.attempt), (id, bytes as u64, 0));
        assert!(end.outcome == PassOutcome::Returned(args.into()), "{bytes} bytes");
    }
    let error = client.submit(&Pass::named("echo", vec![0; 65_537])).unwrap_err();
    assert_eq!(error.to_string(), "the arguments have 65537 bytes, and 65536 fit");
    client.submit(&Pass::named("long", vec![0; 65_536])).unwrap();
    assert_eq!(next(&client).outcome, PassOutcome::TooLong(65_537));
}

#[test]
fn errors_and_panics_are_results_and_the_worker_lives_on() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let client = PassClient::join(&host, named("errors")).unwrap();
    for _ in 0..3 {
        client.submit(&Pass::named("fail", vec![])).unwrap();
        assert_eq!(next(&client).outcome, PassOutcome::Failed("no such image".into()));
        client.submit(&Pass::named("panic", vec![])).unwrap();
        assert_eq!(next(&client).outcome, PassOutcome::Panicked("too few".into()));
    }
}

#[test]
fn a_full_range_is_busy_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("full")).unwrap();
    for tag in 0..64 {
        client.submit(&Pass::named("echo", vec![]).tag(tag)).unwrap();
    }
    let refused = client.submit(&Pass::named("echo", vec![]));
    assert!(matches!(refused, Err(SubmitError::Busy(64))), "{refused:?}");
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let mut tags = Vec::new();
    while tags.len() < 64 {
        client.poll(|end| tags.push(end.tag));
    }
    assert!(tags.iter().all(|tag| *tag < 64));
    tags.sort_unstable();
    tags.dedup();
    assert_eq!(tags.len(), 64);
}

#[tokio::test]
async fn a_call_is_awaited_and_so_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("async")).unwrap();
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let calls = (0..1_000u64).map(|tag| {
        let client = client.clone();
        async move {
            let pass = Pass::named("echo", tag.to_le_bytes().to_vec()).tag(tag);
            let end = client.call(&pass).await.unwrap();
            assert_eq!(end.outcome, PassOutcome::Returned(tag.to_le_bytes().to_vec().into()));
            end.tag
        }
    });
    let tags = futures_util::future::join_all(calls).await;
    assert_eq!(tags, (0..1_000).collect::<Vec<_>>());
    let id = client.submit(&Pass::named("echo", vec![9])).unwrap();
    assert_eq!(client.recv().await.unwrap().pass, id);
}

/// Each end goes to the one it is for, whichever of them happens to collect it.
#[test]
fn whoever_polls_hands_on_what_the_sink_and_the_callers_await() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("mixed")).unwrap();
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let (told, sunk) = std::sync::mpsc::channel();
    let sink = move |ends: Vec<Completion<'static>>| {
        ends.into_iter().for_each(|end| told.send(end.tag).unwrap());
    };
    client.route_to(Box::new(sink)).unwrap();
    let echo = |tag| Pass::named("echo", vec![]).tag(tag);
    let (mut polled, mut submitted) = (Vec::new(), 0);
    while submitted < 2_000 {
        if client.room() < 5 {
            client.poll(|end| polled.push(end.tag));
            continue;
        }
        client.prepare(&echo(submitted)).unwrap().submit();
        client.prepare_all(&[echo(submitted + 1), echo(submitted + 2)]).unwrap().submit();
        client.submit(&echo(submitted + 3)).unwrap();
        submitted += 4;
        client.poll(|end| polled.push(end.tag));
    }
    let mut sunk: Vec<u64> =
        (0..1_500).map(|_| sunk.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    while polled.len() < 500 {
        client.poll(|end| polled.push(end.tag));
    }
    polled.sort_unstable();
    sunk.sort_unstable();
    assert_eq!(polled, (3..2_000).step_by(4).collect::<Vec<_>>());
    assert_eq!(sunk, (0..2_000).filter(|tag| tag % 4 != 3).collect::<Vec<_>>());
}

#[test]
fn of_a_batch_all_passes_are_taken_or_none() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("batch")).unwrap();
    let batch = |passes| vec![Pass::named("echo", vec![]); passes];
    let refused = client.prepare_all(&batch(65));
    assert!(matches!(refused, Err(SubmitError::Busy(64))), "{refused:?}");
    let mut long = batch(3);
    long[2].args = vec![0; 65_537].into();
    let refused = client.prepare_all(&long);
    assert!(matches!(refused, Err(SubmitError::TooLong { bytes: 65_537, .. })), "{refused:?}");
    assert_eq!(client.room(), 64);
    let prepared = client.prepare_all(&batch(64)).unwrap();
    let mut passes: Vec<_> = prepared.passes().collect();
    passes.dedup();
    assert_eq!((passes.len(), client.room()), (64, 0));
    drop(prepared);
    assert_eq!(client.room(), 64);
}

#[test]
fn what_nobody_can_run_comes_back_after_the_stated_time() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let options = ClientOptions { no_worker_after: Duration::from_millis(200), ..named("nobody") };
    let client = PassClient::join(&host, options).unwrap();
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let id = client.submit(&Pass::named("unheard of", vec![]).tag(5)).unwrap();
    let end = next(&client);
    assert_eq!(end, Completion { pass: id, tag: 5, attempt: 0, outcome: PassOutcome::NoWorker });
    client.submit(&Pass::named("echo", vec![1])).unwrap();
    assert_eq!(next(&client).outcome, PassOutcome::Returned(vec![1].into()));
}

#[test]
fn a_pass_is_taken_back_until_it_is_claimed() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("cancel")).unwrap();
    let first = client.submit(&Pass::named("echo", vec![1]).tag(1)).unwrap();
    client.submit(&Pass::named("echo", vec![2]).tag(2)).unwrap();
    assert!(client.cancel(first));
    assert!(!client.cancel(first));
    client.submit(&Pass::named("echo", vec![3]).tag(3)).unwrap();
    assert_eq!(next(&client).outcome, PassOutcome::Cancelled);
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let mut tags = Vec::new();
    while tags.len() < 2 {
        client.poll(|end| tags.push(end.tag));
    }
    tags.sort_unstable();
    assert_eq!(tags, [2, 3]);
}
