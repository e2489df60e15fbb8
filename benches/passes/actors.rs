//! What the mailboxes cost: one pass at a time through PassSubmitter beside a bare echo, and batches.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use actix::prelude::*;
use futures_util::stream::{self, StreamExt};
use meshwork::Placement;
use meshwork::passes::Spin;
use meshwork::passes::{Pass, Passes, Submit, SubmitBatch};
use tokio::sync::{mpsc, oneshot};

use crate::common::echo::ECHO;
use crate::common::shared_directory;
use crate::worker::Role;

/// Passes submitted one after another in a round.
const SINGLES: usize = 2_000;
/// Batches of a round, how large each is, and how many are under way.
const BATCHES: usize = 4_000;
const BATCH: usize = 64;
const BATCHES_UNDER_WAY: usize = 6;

/// What one round brought.
pub(crate) struct Actors {
    /// A bare echo between two actors of one arbiter, and the wake of that arbiter by another thread.
    pub(crate) floor_ns: f64,
    /// `Submit`, awaited one at a time.
    pub(crate) submit_ns: f64,
    /// Passes a second in batches of 64.
    pub(crate) batch_per_s: f64,
}

impl Actors {
    pub(crate) fn measure() -> Self {
        System::new().block_on(async {
            let directory = shared_directory();
            let _worker = Role::Worker(directory.path().to_owned(), Spin::Adaptive).start();
            let passes = Passes::builder(directory.path()).placement(Placement::single()).start();
            let passes = passes.await.expect("a fresh directory");
            let floor_ns = echo_ns().await + wake_ns().await;
            let (submit_ns, batch_per_s) = (submit_ns(&passes).await, batch_per_s(&passes).await);
            passes.leave().await;
            Self { floor_ns, submit_ns, batch_per_s }
        })
    }
}

struct Echo;

impl Actor for Echo {
    type Context = Context<Self>;
}

#[derive(Message)]
#[rtype(result = "u64")]
struct Say(u64);

impl Handler<Say> for Echo {
    type Result = u64;

    fn handle(&mut self, Say(what): Say, _: &mut Self::Context) -> u64 {
        what
    }
}

async fn echo_ns() -> f64 {
    let echo = Echo.start();
    let begun = Instant::now();
    for what in 0..SINGLES as u64 {
        assert_eq!(echo.send(Say(what)).await.expect("it runs"), what);
    }
    begun.elapsed().as_nanos() as f64 / SINGLES as f64
}

/// From a request that a spinning thread sees at once, to the arbiter that it wakes.
async fn wake_ns() -> f64 {
    let asked = Arc::new(AtomicU64::new(0));
    let (senders, mut receive) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
    let seen = Arc::clone(&asked);
    let waker = std::thread::spawn(move || {
        for round in 1..=SINGLES as u64 {
            while seen.load(Acquire) < round {
                std::hint::spin_loop();
            }
            let sender = receive.blocking_recv().expect("sent before the round is asked for");
            // The arbiter waits for it.
            let _ = sender.send(());
        }
    });
    let begun = Instant::now();
    for round in 1..=SINGLES as u64 {
        let (sender, receiver) = oneshot::channel();
        senders.send(sender).expect("the thread lives");
        asked.store(round, Release);
        receiver.await.expect("it was woken");
    }
    let took = begun.elapsed().as_nanos() as f64 / SINGLES as f64;
    waker.join().expect("it ends after its rounds");
    took
}

async fn submit_ns(passes: &Passes) -> f64 {
    let mut begun = Instant::now();
    // The first half warms up.
    for round in 0..2 * SINGLES {
        if round == SINGLES {
            begun = Instant::now();
        }
        let pass = Pass::named(ECHO, vec![7; 48]);
        let end = passes.submitter().send(Submit(pass)).await.expect("it runs").expect("room");
        end.outcome.into_result().expect("the worker echoes");
    }
    begun.elapsed().as_nanos() as f64 / SINGLES as f64
}

async fn batch_per_s(passes: &Passes) -> f64 {
    let begun = Instant::now();
    let batches = stream::iter(0..BATCHES).map(|_| {
        let batch = (0..BATCH).map(|_| Pass::named(ECHO, vec![7; 48])).collect();
        passes.submitter().send(SubmitBatch(batch))
    });
    let returned = batches
        .buffer_unordered(BATCHES_UNDER_WAY)
        .map(|ends| ends.expect("it runs").expect("there is room").len())
        .fold(0, |sum, ends| async move { sum + ends })
        .await;
    assert_eq!(returned, BATCHES * BATCH);
    returned as f64 / begun.elapsed().as_secs_f64()
}
