//! Passes within one process: submitted, run, collected, on the real file with real locks.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use meshwork_actors::clock::Clock;
use meshwork_actors::host::pass::{Completion, Pass, PassOutcome, SubmitError};
use meshwork_actors::host::pass_client::{ClientOptions, PassClient, PreparedBatch};
use meshwork_actors::host::pass_host::PassHost;
use meshwork_actors::host::reclaimer::{ReclaimReport, Reclaimer, ReclaimerOptions};
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
    until("there is an end", || {
        assert!(client.poll(|end| one = Some(end.into_owned())) <= 1);
        one.is_some()
    });
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

/// Every way to submit, from threads of their own, on one client with little room: each end is told
/// once, to whom it is for, and no slot is lost.
#[test]
fn all_ways_to_submit_share_a_client() {
    const EACH: u64 = 5_000;
    const CALLS: u64 = 10 * EACH;
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("shared")).unwrap();
    let _workers =
        [0, 1].map(|_| WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap());
    let (told, sunk) = std::sync::mpsc::channel();
    let sink = move |ends: Vec<Completion<'static>>| {
        ends.into_iter().for_each(|end| told.send(end.tag).unwrap());
    };
    client.route_to(Box::new(sink)).unwrap();
    let echo = |tag: u64| Pass::named("echo", tag.to_le_bytes().to_vec()).tag(tag);
    let until_room = |submit: &dyn Fn() -> Result<(), SubmitError>| {
        until("there is room", || match submit() {
            Ok(()) => true,
            Err(SubmitError::Busy(64)) => false,
            Err(error) => panic!("{error}"),
        });
    };
    let mut polled = Vec::new();
    std::thread::scope(|scope| {
        for first in [0, EACH] {
            let client = &client;
            scope.spawn(move || {
                for tag in first..first + EACH {
                    until_room(&|| client.submit(&echo(tag)).map(drop));
                }
            });
        }
        scope.spawn(|| {
            for first in (2 * EACH..3 * EACH).step_by(5) {
                let batch: Vec<_> = (first..first + 5).map(echo).collect();
                until_room(&|| client.prepare_all(&batch).map(PreparedBatch::submit));
            }
        });
        scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            runtime.unwrap().block_on(async {
                for tag in CALLS..CALLS + 1_000 {
                    let pass = echo(tag);
                    let call = client.call(&pass);
                    if tag % 3 == 0 {
                        // Given up at its first wait.
                        let _ = tokio::time::timeout(Duration::ZERO, call).await;
                    } else {
                        assert_eq!(call.await.unwrap().tag, tag);
                    }
                }
            });
        });
        until("all are polled", || {
            client.poll(|end| polled.push(end.tag));
            polled.len() as u64 >= 2 * EACH
        });
    });
    let mut sunk: Vec<u64> =
        (0..EACH).map(|_| sunk.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    polled.sort_unstable();
    sunk.sort_unstable();
    assert_eq!(polled, (0..2 * EACH).collect::<Vec<_>>());
    assert_eq!(sunk, (2 * EACH..3 * EACH).collect::<Vec<_>>());
    until("every slot is free", || {
        client.poll(|end| panic!("{end:?}"));
        client.room() == 64
    });
}

#[test]
fn of_a_batch_all_passes_are_taken_or_none() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("batch")).unwrap();
    let batch = |passes| vec![Pass::named("echo", vec![]); passes];
    let refused = client.prepare_all(&batch(65)).unwrap_err();
    assert!(matches!(refused, SubmitError::TooMany { passes: 65, slots: 64 }), "{refused:?}");
    assert!(!refused.is_retryable());
    let one = client.prepare_all(&batch(1)).unwrap();
    let refused = client.prepare_all(&batch(64));
    assert!(matches!(refused, Err(SubmitError::Busy(64))), "{refused:?}");
    drop(one);
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

#[test]
fn a_poller_that_panics_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("panics")).unwrap();
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    for tag in 0..64 {
        client.submit(&Pass::named("echo", vec![]).tag(tag)).unwrap();
    }
    let (mut told, mut panics) = (Vec::new(), 0);
    until("all are told", || {
        let polled = catch_unwind(AssertUnwindSafe(|| {
            client.poll(|end| {
                // Each reply is handed out a second time.
                panics += 1;
                assert_eq!(panics % 2, 0, "the first time");
                told.push(end.tag);
            })
        }));
        polled.is_ok() && told.len() == 64
    });
    told.sort_unstable();
    assert_eq!(told, (0..64).collect::<Vec<_>>());
    assert_eq!(client.room(), 64);
}

#[test]
fn a_sink_that_panics_is_told_of_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("sink")).unwrap();
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let (sender, told) = std::sync::mpsc::channel();
    let sink = move |ends: Vec<Completion<'static>>| {
        let tags: Vec<u64> = ends.iter().map(|end| end.tag).collect();
        sender.send(tags.clone()).unwrap();
        assert!(!tags.contains(&1), "the first");
    };
    client.route_to(Box::new(sink)).unwrap();
    for tag in [1, 2] {
        client.prepare(&Pass::named("echo", vec![]).tag(tag)).unwrap().submit();
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(vec![tag]));
    }
}

#[test]
fn ends_that_nobody_polls_keep_their_slots_also_of_what_was_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("cancels")).unwrap();
    let pass = Pass::named("echo", vec![]).tag(5);
    for _ in 0..64 {
        assert!(client.cancel(client.submit(&pass).unwrap()));
    }
    assert!(matches!(client.submit(&pass), Err(SubmitError::Busy(64))));
    let mut cancelled = 0;
    client.poll(|end| cancelled += u32::from(end.outcome == PassOutcome::Cancelled));
    assert_eq!((cancelled, client.room()), (64, 64));
}

#[test]
fn passes_are_taken_back_by_their_tag() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = PassClient::join(&host, named("tags")).unwrap();
    for tag in [7, 8, 7] {
        client.submit(&Pass::named("echo", vec![]).tag(tag)).unwrap();
    }
    assert_eq!([7, 9, 7].map(|tag| client.cancel_tagged(tag)), [2, 0, 0]);
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    let mut ends = Vec::new();
    until("all are told", || {
        client.poll(|end| ends.push((end.tag, end.outcome == PassOutcome::Cancelled)));
        ends.len() == 3
    });
    ends.sort_unstable();
    assert_eq!(ends, [(7, true), (7, true), (8, false)]);
}

/// Leaves two replies in the range of a client of this name.
fn leave(host: &Arc<PassHost>, name: &str) {
    let client = PassClient::join(host, named(name)).unwrap();
    let _worker = WorkerThread::spawn(host, registry(), &WorkerOptions::default()).unwrap();
    for tag in [1, 2] {
        client.submit(&Pass::named("echo", vec![]).tag(tag)).unwrap();
    }
    until("both are done", || {
        let slots = host.ring().range(client.index());
        slots.filter(|slot| host.ring().word(*slot).is_done()).count() == 2
    });
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not in a minute: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn replies_of_a_client_without_a_name_are_not_the_next_ones() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    leave(&host, "");
    let client = PassClient::join(&host, named("")).unwrap();
    assert_eq!((client.index().0, client.room(), client.poll(|_| {})), (1, 64, 0));
    leave(&host, "a");
    assert_eq!(PassClient::join(&host, named("a")).unwrap().room(), 62);
}

#[test]
fn a_name_that_would_be_cut_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    assert!(PassClient::join(&host, named(&"n".repeat(48))).is_ok());
    let error = PassClient::join(&host, named(&"n".repeat(49))).unwrap_err();
    assert_eq!(error.to_string(), "the client's name has 49 bytes, and 48 fit");
}

#[tokio::test]
async fn adopted_replies_that_nobody_polls_do_not_take_room_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    leave(&host, "calls");
    let options = ClientOptions { adopted_for: Duration::ZERO, ..named("calls") };
    let client = PassClient::join(&host, options).unwrap();
    assert_eq!(client.room(), 62);
    let _worker = WorkerThread::spawn(&host, registry(), &WorkerOptions::default()).unwrap();
    // Its collector thread looks at the slots every now and then.
    client.call(&Pass::named("echo", vec![])).await.unwrap();
    let orphaned = &host.ring().header().orphaned;
    let is_counted = || orphaned.load(std::sync::atomic::Ordering::SeqCst) == 2;
    // The slot of the call is free a moment after its end was told.
    until("they are counted, and there is room", || is_counted() && client.room() == 64);
}

/// Between two polls it does something else for a while.
#[test]
fn one_who_polls_seldom_is_told_that_nobody_can_run_it() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let options = ClientOptions { no_worker_after: Duration::from_millis(50), ..named("seldom") };
    let client = PassClient::join(&host, options).unwrap();
    client.submit(&Pass::named("nobody's", vec![])).unwrap();
    let begun = std::time::Instant::now();
    let mut outcome = None;
    while outcome.is_none() {
        std::thread::sleep(Duration::from_millis(20));
        client.poll(|end| outcome = Some(end.into_owned().outcome));
    }
    assert_eq!(outcome, Some(PassOutcome::NoWorker));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// Two threads need memory behind their slots at the same time.
#[test]
fn every_slot_has_memory_behind_it_whoever_asked_first() {
    for _ in 0..50 {
        let directory = tempfile::tempdir().unwrap();
        let host = open(directory.path());
        let client = PassClient::join(&host, named("both")).unwrap();
        let pass = Pass::named("echo", vec![7; 65_536]);
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    together.wait();
                    client.submit(&pass).unwrap();
                });
            }
        });
        while client.room() > 0 {
            client.submit(&pass).unwrap();
        }
        let file = std::fs::metadata(host.ring().file().unwrap().path()).unwrap();
        // Arguments are there anyway, for they were written; results are not yet.
        let there = 512 * std::os::unix::fs::MetadataExt::blocks(&file);
        assert!(there >= 2 * 64 * 65_536, "{there} bytes");
    }
}

#[test]
fn a_pass_past_its_deadline_is_told_of_once() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let (sender, begun) = std::sync::mpsc::channel();
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let (registry, may_go) = (PassRegistry::new(), std::sync::Mutex::new(may_go));
    let hang = registry.register("hang", move |_| {
        sender.send(()).unwrap();
        may_go.lock().unwrap().recv().unwrap();
        Ok::<_, String>(vec![])
    });
    hang.unwrap();
    let _worker = WorkerThread::spawn(&host, registry, &WorkerOptions::default()).unwrap();
    let client = PassClient::join(&host, named("hangs")).unwrap();
    client.submit(&Pass::named("hang", vec![]).deadline(Duration::from_millis(1))).unwrap();
    begun.recv().unwrap();
    let mut reclaimer = Reclaimer::new(&host, ReclaimerOptions::default());
    let mut report = ReclaimReport::default();
    let over = Clock.now() + Duration::from_secs(1);
    (0..3).for_each(|_| reclaimer.kill_overdue(over, &mut report));
    // Its process is this one, which is spared.
    assert_eq!((report.hung.len(), report.killed.len()), (1, 0));
    go.send(()).unwrap();
}
