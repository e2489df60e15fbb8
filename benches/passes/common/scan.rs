//! A watchdog's look at the heartbeat table, with no one dead. All rows that are taken beat.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use meshwork::actors::clock::Clock;
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::reclaimer::{Heart, ReclaimerOptions};
use meshwork::protocol::pass::beats::Beats;

use super::shared_directory;

/// Scans of one measurement.
const SCANS: u32 = 200_000;

/// How often every row beats.
const BEAT_EVERY: Duration = Duration::from_millis(10);

/// Nanoseconds of one scan of so many rows, of which some are taken, with the reading of the coarse
/// clock before it.
pub(crate) fn scan_ns(rows: usize, taken: usize) -> f64 {
    let directory = shared_directory();
    let host = PassHost::open(directory.path(), None).expect("a fresh directory");
    let seats: Vec<_> =
        (0..taken).map(|_| host.join_worker("bench").expect("there is a free row")).collect();
    let heart = Heart::new(&host);
    let beating = Beating::start(move || heart.beat());
    let mut beats = Beats::new(rows, ReclaimerOptions::default().grace);
    let table = &host.ring().beats()[..rows];
    let mut suspects = 0u32;
    let ns = time_scans(|| beats.scan(Clock.coarse(), black_box(table), |_| suspects += 1));
    drop(beating);
    for seat in seats {
        host.leave_worker(seat);
    }
    assert_eq!(suspects, 0, "living workers were suspected");
    ns
}

/// Nanoseconds of one of many scans.
pub(crate) fn time_scans(mut scan: impl FnMut()) -> f64 {
    (0..SCANS / 10).for_each(|_| scan());
    let begin = Instant::now();
    (0..SCANS).for_each(|_| scan());
    begin.elapsed().as_nanos() as f64 / f64::from(SCANS)
}

/// A thread that makes hearts beat until this is dropped.
pub(crate) struct Beating {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beating {
    pub(crate) fn start(beat: impl Fn() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Acquire) {
                beat();
                std::thread::sleep(BEAT_EVERY);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        self.stop.store(true, Release);
        if let Some(thread) = self.thread.take() {
            // It has nothing to panic on.
            let _ = thread.join();
        }
    }
}
