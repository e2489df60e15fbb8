//! How long after `kill -9` of a worker its pass runs in another: by the Watchdog of one who submits.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use actix::System;
use meshwork::passes::{Pass, PassClient, PassOutcome, Passes, Spin};

use crate::common::process::Process;
use crate::common::shared_directory;
use crate::worker::{HANG, Role, monotonic_ns};

/// Workers that are killed.
const KILLS: usize = 25;
/// A pass that does not say in this time that it runs has failed.
const BEGINS_WITHIN: Duration = Duration::from_secs(5);
/// Until workers sleep, and the watchdog has seen them.
const SETTLE: Duration = Duration::from_millis(150);

/// Milliseconds from each kill until the second attempt began.
pub(crate) fn times_ms() -> Vec<f64> {
    let directory = shared_directory();
    let path = directory.path().to_owned();
    System::new().block_on(async move {
        let passes = Passes::builder(&path).start().await.expect("a fresh directory");
        let client = passes.client().clone();
        let kills = tokio::task::spawn_blocking(move || kills_ms(&client, &path));
        let times = kills.await.expect("every pass runs again");
        passes.leave().await;
        times
    })
}

fn kills_ms(client: &PassClient, directory: &Path) -> Vec<f64> {
    let start = || Role::Worker(directory.to_owned(), Spin::Adaptive).start();
    let mut workers = [start(), start()];
    let path: PathBuf = directory.join("began");
    let began = UnixDatagram::bind(&path).expect("the name is free");
    began.set_read_timeout(Some(BEGINS_WITHIN)).expect("a time-out over zero");
    let path = path.to_str().expect("a temporary path is text");
    let pass = Pass::named(HANG, path.as_bytes());
    (0..KILLS)
        .map(|_| {
            std::thread::sleep(SETTLE);
            client.submit(&pass).expect("there is room");
            let mut pid = [0; 4];
            began.recv(&mut pid).expect("the pass begins");
            let pid = u32::from_le_bytes(pid);
            let victim = workers.iter().position(|worker: &Process| worker.0.id() == pid);
            let victim = victim.expect("it runs in one of the workers");
            // Past the bookkeeping of a pass that has just begun.
            std::thread::sleep(Duration::from_millis(2));
            let killed_ns = monotonic_ns();
            workers[victim].0.kill().expect("it was not waited for yet");
            let began_ns = second_attempt(client);
            workers[victim] = start();
            began_ns.saturating_sub(killed_ns) as f64 / 1e6
        })
        .collect()
}

/// When the second attempt of the pass began.
fn second_attempt(client: &PassClient) -> u64 {
    let mut began_ns = None;
    while began_ns.is_none() {
        client.poll(|completion| {
            assert_eq!(completion.attempt, 1, "{completion:?}");
            let PassOutcome::Returned(bytes) = &completion.outcome else {
                panic!("the pass came to {completion:?}");
            };
            let bytes = bytes.first_chunk().expect("eight bytes of time");
            began_ns = Some(u64::from_le_bytes(*bytes));
        });
        std::thread::yield_now();
    }
    began_ns.unwrap_or_default()
}
