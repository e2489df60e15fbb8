//! How long after `kill -9` of a worker its pass runs in another.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::Duration;

use meshwork::actors::clock::Clock;
use meshwork::actors::host::pass::{Pass, PassOutcome};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::reclaimer::{ReclaimReport, Reclaimer, ReclaimerOptions};
use meshwork::passes::Spin;
use meshwork::protocol::pass::WorkerIndex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::worker::{HANG, Process, Role, monotonic_ns, shared_directory};

/// Workers that are killed.
const KILLS: usize = 25;
/// A pass that does not say in this time that it runs has failed.
const BEGINS_WITHIN: Duration = Duration::from_secs(5);
/// Until workers sleep, and whoever recovers them has seen them.
const SETTLE: Duration = Duration::from_millis(150);

/// Milliseconds from each kill until the second attempt began.
pub(crate) fn times_ms() -> Vec<f64> {
    let directory = shared_directory();
    let host = PassHost::open(directory.path(), None).expect("a fresh directory");
    let start = || Process::start(&Role::Worker(directory.path().to_owned(), Spin::Adaptive));
    let mut workers = [start(), start()];
    let path: PathBuf = directory.path().join("began");
    let began = UnixDatagram::bind(&path).expect("the name is free");
    began.set_read_timeout(Some(BEGINS_WITHIN)).expect("a time-out over zero");
    let options = ClientOptions { name: "bench".to_owned(), ..ClientOptions::default() };
    let client = PassClient::join(&host, options).expect("there is a free row");
    let _recovery = Recovery::start(&host);
    let path = path.to_str().expect("a temporary path is text");
    let pass = Pass::named(HANG, path.as_bytes());
    (0..KILLS)
        .map(|_| {
            std::thread::sleep(SETTLE);
            client.submit(&pass).expect("there is room");
            let mut pid = [0; 4];
            began.recv(&mut pid).expect("the pass begins");
            let pid = u32::from_le_bytes(pid);
            let victim = workers
                .iter()
                .position(|worker| worker.pid() == pid)
                .expect("it runs in one of the workers");
            // Past the bookkeeping of a pass that has just begun.
            std::thread::sleep(Duration::from_millis(2));
            let killed_ns = monotonic_ns();
            workers[victim].kill();
            let began_ns = second_attempt(&client);
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

/// Recovers dead workers for as long as it lives.
struct Recovery {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Recovery {
    fn start(host: &Arc<PassHost>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (host, stopped) = (Arc::clone(host), Arc::clone(&stop));
        let thread = std::thread::spawn(move || Watch::over(&host).until(&stopped));
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.stop.store(true, Release);
        if let Some(thread) = self.thread.take() {
            // If it panicked, no pass came back, which was said already.
            let _ = thread.join();
        }
    }
}

/// Waits on the workers' processes, and looks at the hearts between.
struct Watch {
    host: Arc<PassHost>,
    reclaimer: Reclaimer,
    processes: Vec<(WorkerIndex, OwnedFd)>,
}

impl Watch {
    /// How often hearts are looked at, and who is new.
    const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

    fn over(host: &Arc<PassHost>) -> Self {
        let reclaimer = Reclaimer::new(host, ReclaimerOptions::default());
        Self { host: Arc::clone(host), reclaimer, processes: Vec::new() }
    }

    fn until(mut self, stop: &AtomicBool) {
        while !stop.load(Acquire) {
            let mut report = ReclaimReport::default();
            self.reclaimer.look(Clock.now(), &mut report).expect("locks can be looked at");
            for seen in report.joined {
                if let Some(process) = seen.process.open(&self.host.process()) {
                    self.processes.push((seen.worker, process));
                }
            }
            self.wait_for_ends();
        }
    }

    fn wait_for_ends(&mut self) {
        let mut fds: Vec<PollFd<'_>> =
            self.processes.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        let ended = poll(&mut fds, Some(&Self::LOOK_EVERY)).unwrap_or(0);
        if ended == 0 {
            return;
        }
        let mut has_ended = fds.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>();
        has_ended.reverse();
        let reclaimer = &mut self.reclaimer;
        self.processes.retain(|(worker, _)| {
            let ended = has_ended.pop().unwrap_or(false);
            if ended {
                let mut report = ReclaimReport::default();
                reclaimer.probe_worker(*worker, &mut report).expect("locks can be looked at");
            }
            !ended
        });
    }
}
