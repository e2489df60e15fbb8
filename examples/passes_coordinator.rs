//! Counts primes with the help of worker processes, and tells what becomes of them.
//!
//! ```sh
//! cargo run --release --example passes_coordinator -- /dev/shm/primes 1000 &
//! cargo run --release --example passes_worker -- /dev/shm/primes --name worker-1 &
//! cargo run --release --example passes_worker -- /dev/shm/primes --name worker-2 &
//! cargo run --release -- passes /dev/shm/primes    # who is there, and how fast it goes
//! kill -9 %2                                       # nothing is lost
//! ```

use std::collections::HashSet;

use std::time::Duration;

use futures_util::StreamExt;
use meshwork::passes::{Pass, PassEvent, Passes};

/// Numbers that one pass looks at.
const STEP: u64 = 20_000;

#[actix::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(directory), Some(count)) = (args.next(), args.next()) else {
        return Err("usage: passes_coordinator DIRECTORY PASSES".into());
    };
    let count: u64 = count.parse()?;

    let passes = Passes::builder(directory)
        .name("coordinator")
        // Workers may be started later: until there is one, passes wait.
        .no_worker_after(Duration::from_secs(600))
        .start()
        .await?;
    let mut events = passes.events();
    actix::spawn(async move {
        while let Some(event) = events.next().await {
            match event {
                PassEvent::WorkerJoined(it) => println!("{} ({}) joined", it.name, it.process.pid),
                PassEvent::WorkerLost(it) => println!("{} ({}) is gone", it.name, it.process.pid),
                PassEvent::PassReclaimed(pass) => println!("pass {pass} waits for another worker"),
                other => println!("{other:?}"),
            }
        }
    });

    let client = passes.client();
    let (mut submitted, mut returned, mut again, mut primes) = (0, 0, 0, 0);
    let mut under_way = HashSet::new();
    while returned < count {
        // Fills the client's slots. Whoever submits more gets `Busy`: nothing is ever dropped.
        while submitted < count && client.room() > 0 {
            let (first, end) = (submitted * STEP, (submitted + 1) * STEP);
            let args = [first.to_le_bytes(), end.to_le_bytes()].concat();
            under_way.insert(client.submit(&Pass::named("count_primes", args).tag(submitted))?);
            submitted += 1;
        }
        let end = client.recv().await?;
        if !under_way.remove(&end.pass) {
            // A coordinator of this name died, and left it to this one.
            continue;
        }
        // The worker that began it first may have died: then this was a later attempt.
        again += u64::from(end.attempt > 0);
        let result: [u8; 8] = end.outcome.into_result()?.as_slice().try_into()?;
        primes += u64::from_le_bytes(result);
        returned += 1;
        if returned % count.div_ceil(10) == 0 {
            println!("{returned} of {count} returned");
        }
    }
    println!("all {count} returned, {again} of them after a worker's death");
    println!("there are {primes} primes below {}", count * STEP);
    passes.leave().await;
    Ok(())
}
