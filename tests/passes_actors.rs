//! The messages that the actors of passes take, and what they answer.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod passes_common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::StreamExt;
use meshwork::passes::{
    AddWorkers, Cancel, ClosureId, Geometry, InFlight, Pass, PassEvent, PassHost, PassOutcome,
    PassRegistry, Passes, PassesBuilder, Presence, ReclaimReport, RegisterError, RegisterPass,
    Registered, ScanNow, Submit, SubmitBatch, SubmitError, WatchPasses, WorkerIndex,
};
use passes_common::{Process, example, hold};
use rustix::process::Signal;

fn builder(directory: &Path) -> PassesBuilder {
    let geometry = Geometry { clients: 4, slots_per_client: 64, ..Geometry::default() };
    Passes::builder(directory)
        .name("test")
        .geometry(geometry)
        .no_worker_after(Duration::from_secs(600))
}

fn echo() -> PassRegistry {
    let registry = PassRegistry::new();
    registry.register("echo", |call| Ok::<_, String>(call.args.to_vec())).unwrap();
    registry
}

fn numbered(count: u64) -> Vec<Pass<'static>> {
    let pass = |n: u64| Pass::named("echo", n.to_le_bytes().to_vec()).tag(n);
    (0..count).map(pass).collect()
}

#[actix::test]
async fn a_batch_is_answered_in_its_order_and_refused_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let passes = builder(directory.path()).registry(echo()).workers(2).start().await.unwrap();
    let submitter = passes.submitter();

    let end = submitter.send(Submit(numbered(1).remove(0))).await.unwrap().unwrap();
    assert_eq!(end.outcome, PassOutcome::Returned(vec![0; 8].into()));

    let refused = submitter.send(SubmitBatch(numbered(65))).await.unwrap();
    assert!(matches!(refused, Err(SubmitError::TooMany { passes: 65, slots: 64 })), "{refused:?}");
    assert_eq!(passes.client().room(), 64);

    let ends = submitter.send(SubmitBatch(numbered(64))).await.unwrap().unwrap();
    let returned: Vec<_> = ends.into_iter().map(|end| (end.tag, end.outcome)).collect();
    let expected = |n: u64| (n, PassOutcome::Returned(n.to_le_bytes().to_vec().into()));
    assert_eq!(returned, (0..64).map(expected).collect::<Vec<_>>());
    assert_eq!(submitter.send(SubmitBatch(vec![])).await.unwrap().unwrap(), []);

    let long = Pass::named("echo", vec![0; (64 << 10) + 1]);
    let batch = [numbered(3), vec![long]].concat();
    let refused = submitter.send(SubmitBatch(batch)).await.unwrap();
    assert!(matches!(refused, Err(SubmitError::TooLong { bytes: 65_537, .. })), "{refused:?}");
    assert_eq!(passes.client().room(), 64);
    passes.leave().await;
}

#[actix::test]
async fn passes_are_taken_back_by_a_message_and_end_for_who_submitted_them() {
    let directory = tempfile::tempdir().unwrap();
    let passes = builder(directory.path()).start().await.unwrap();
    let submitter = passes.submitter();
    let one = submitter.send(Submit(Pass::named("echo", b"".as_slice()).tag(7)));
    let several = submitter.send(SubmitBatch(numbered(3)));
    let cancel = async {
        // Behind the two in the same mailbox.
        let tagged = [7, 1].map(|tag| submitter.send(Cancel(tag)));
        let cancelled = futures_util::future::join_all(tagged).await;
        passes.workers().registry().register("echo", |_| Ok::<_, String>([])).unwrap();
        passes.workers().address().send(AddWorkers(1)).await.unwrap().unwrap();
        cancelled
    };
    let (one, several, cancelled) = tokio::join!(one, several, cancel);
    assert_eq!(cancelled.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(one.unwrap().unwrap().outcome, PassOutcome::Cancelled);
    let outcomes: Vec<_> = several.unwrap().unwrap().into_iter().map(|end| end.outcome).collect();
    let returned = || PassOutcome::Returned(vec![].into());
    assert_eq!(outcomes, [returned(), PassOutcome::Cancelled, returned()]);
    passes.leave().await;
}

#[actix::test]
async fn a_closure_and_workers_can_come_later() {
    let directory = tempfile::tempdir().unwrap();
    let passes = builder(directory.path()).workers(1).start().await.unwrap();
    let worker = passes.workers().address();
    let waiting = passes.submitter().send(Submit(Pass::named("late", b"".as_slice())));
    let register = |answer: &'static [u8]| RegisterPass {
        id: ClosureId::of_name("late"),
        closure: Registered {
            name: "late".into(),
            run: Arc::new(move |_, reply| {
                reply.write(answer);
                Ok(())
            }),
        },
    };
    let (end, registered) = tokio::join!(waiting, worker.send(register(b"here")));
    assert_eq!(registered.unwrap(), Ok(()));
    let end = end.unwrap().unwrap();
    assert_eq!(end.outcome, PassOutcome::Returned(b"here".as_slice().into()));
    let taken = worker.send(register(b"other")).await.unwrap();
    assert!(matches!(taken, Err(RegisterError::Taken { .. })), "{taken:?}");

    let added = worker.send(AddWorkers(2)).await.unwrap().unwrap();
    assert_eq!(added, [WorkerIndex(1), WorkerIndex(2)]);
    let full = worker.send(AddWorkers(64)).await.unwrap().unwrap_err();
    assert_eq!(full.to_string(), "all 64 places for workers are taken by living processes");
    passes.leave().await;
}

/// An actor that is told of events.
struct Watcher(tokio::sync::mpsc::UnboundedSender<PassEvent>);

impl Actor for Watcher {
    type Context = Context<Self>;
}

impl Handler<PassEvent> for Watcher {
    type Result = ();

    fn handle(&mut self, event: PassEvent, _: &mut Self::Context) {
        self.0.send(event).unwrap();
    }
}

/// Looks until what is there is as it should be: processes outside of this one do not tell it.
async fn until(directory: &Path, is_it: impl Fn(InFlight) -> bool) {
    while !is_it(PassHost::look(directory).unwrap().in_flight) {
        tokio::task::yield_now().await;
    }
}

#[actix::test]
async fn watchers_are_told_who_comes_and_goes_and_what_becomes_of_passes() {
    let directory = tempfile::tempdir().unwrap();
    let passes = builder(directory.path()).registry(echo()).workers(1).start().await.unwrap();
    let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
    let watcher = Watcher(sender).start();
    let watchdog = passes.workers().watchdog();
    watchdog.send(WatchPasses(watcher.recipient())).await.unwrap();
    let PassEvent::WorkerJoined(own) = told.recv().await.unwrap() else { panic!() };
    assert_eq!((own.worker, own.process.pid), (WorkerIndex(0), std::process::id()));

    let path = directory.path().display().to_string();
    let mut other = Process::start(&example("passes_worker"), &[&path, "--name", "other"]);
    let PassEvent::WorkerJoined(seen) = told.recv().await.unwrap() else { panic!() };
    assert_eq!((seen.name.as_str(), seen.process.pid), ("other", other.pid()));

    // Nobody lives to see the end of this one.
    let endless = [0u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat();
    let endless = Pass::named("count_primes", endless).attempts(2);
    let first = passes.client().submit(&endless).unwrap();
    until(directory.path(), |passes| passes.claimed == 1).await;
    other.send(Signal::KILL);
    other.ended();
    assert_eq!(told.recv().await.unwrap(), PassEvent::WorkerLost(seen));
    assert_eq!(told.recv().await.unwrap(), PassEvent::PassReclaimed(first));
    assert!(passes.client().cancel(first));
    assert_eq!(passes.client().recv().await.unwrap().outcome, PassOutcome::Cancelled);

    let endless = endless.attempts(1);
    let only = passes.client().submit(&endless).unwrap();
    let mut third = Process::start(&example("passes_worker"), &[&path, "--name", "third"]);
    let PassEvent::WorkerJoined(seen) = told.recv().await.unwrap() else { panic!() };
    until(directory.path(), |passes| passes.claimed == 1).await;
    third.send(Signal::KILL);
    third.ended();
    assert_eq!(told.recv().await.unwrap(), PassEvent::WorkerLost(seen));
    assert_eq!(told.recv().await.unwrap(), PassEvent::PassPoisoned(only));
    assert_eq!(passes.client().recv().await.unwrap().outcome, PassOutcome::Poisoned);
    let counters = PassHost::look(directory.path()).unwrap().counters;
    assert_eq!((counters.requeued, counters.poisoned), (1, 1));

    let report = watchdog.send(ScanNow).await.unwrap().unwrap();
    // The lock of the worker that is left, and that of the client.
    assert_eq!(report, ReclaimReport { probed: 2, ..ReclaimReport::default() });
    let mut events = passes.events();
    assert_eq!(events.next().await, Some(PassEvent::WorkerJoined(own.clone())));
    passes.leave().await;
    // It ends with the watchdog, which may see the worker go before it stops itself.
    let last: Vec<_> = events.collect().await;
    assert!(last.iter().all(|event| *event == PassEvent::WorkerLost(own.clone())), "{last:?}");
}

#[actix::test]
async fn leaving_waits_for_what_runs_and_leaves_what_waits() {
    let directory = tempfile::tempdir().unwrap();
    let registry = echo();
    let (begun, go) = hold(&registry);
    let passes = builder(directory.path()).registry(registry).workers(1).start().await.unwrap();
    let client = passes.client();
    client.submit(&Pass::named("hold", b"".as_slice()).tag(1)).unwrap();
    begun.recv().unwrap();
    client.submit(&Pass::named("echo", b"later".as_slice()).tag(2)).unwrap();

    let let_go = async {
        // Behind what `leave` sends to the same actor: by then the worker has been told.
        passes.workers().address().send(AddWorkers(0)).await.unwrap().unwrap();
        go.send(()).unwrap();
    };
    tokio::join!(passes.leave(), let_go);
    let left = PassHost::look(directory.path()).unwrap();
    assert_eq!(left.workers, []);
    assert_eq!(left.in_flight, InFlight { ready: 1, claimed: 0, done: 1 });
    let end = client.recv().await.unwrap();
    assert_eq!((end.tag, end.outcome), (1, PassOutcome::Returned(b"held".as_slice().into())));
    passes.leave().await;

    drop(passes);
    let clients = || PassHost::look(directory.path()).unwrap().clients;
    // The thread that collects may be the last that has the client.
    while clients()[0].state != Presence::Left {
        tokio::task::yield_now().await;
    }
    // The next of its name runs it, and gets it.
    let passes = builder(directory.path()).registry(echo()).workers(1).start().await.unwrap();
    let end = passes.client().recv().await.unwrap();
    assert_eq!((end.tag, end.outcome), (2, PassOutcome::Returned(b"later".as_slice().into())));
    passes.leave().await;
}
