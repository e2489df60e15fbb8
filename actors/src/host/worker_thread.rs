//! A worker: one thread that claims passes, runs their closures and writes the replies.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread::JoinHandle;

use meshwork_protocol::limits::{PASS_CLOSURES_MAX, PASS_LOOK_EVERY};
use meshwork_protocol::pass::frame::{Reply, Status};
use meshwork_protocol::pass::patience::{Next, Patience, Spin};
use meshwork_protocol::pass::{ClosureId, WorkerIndex};

use super::parking::{pause, wait, wake};
use super::pass_host::{JoinError, PassHost};
use super::pass_ring::{ClaimedCall, PassRing, ReplyWriter, WorkerSeat};
use super::records::NameField;
use super::registry::{Closure, PassCall, PassRegistry, PassReply};
use crate::clock::Clock;
use crate::start::panic_text;

/// How a worker behaves.
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions {
    /// What it is called, in up to 48 bytes.
    pub name: String,
    /// What it does while there is nothing to do.
    pub spin: Spin,
}

/// A worker that runs.
#[derive(Debug)]
pub struct WorkerThread {
    index: WorkerIndex,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    asked: AtomicBool,
    ring: Arc<PassRing>,
    worker: WorkerIndex,
}

impl Stop {
    fn wake(&self) {
        if self.ring.is_here() {
            wake(self.ring.worker(self.worker).wake_word());
        }
    }
}

impl WorkerThread {
    /// Joins, and starts the thread. It leaves when it is told to, when this is dropped, or with the
    /// process.
    ///
    /// # Errors
    ///
    /// [`JoinError`].
    pub fn spawn(
        host: &Arc<PassHost>,
        registry: PassRegistry,
        options: &WorkerOptions,
    ) -> Result<Self, JoinError> {
        let seat = host.join_worker(&options.name)?;
        let index = seat.index();
        let stop = Arc::new(Stop {
            asked: AtomicBool::new(false),
            ring: Arc::clone(host.ring()),
            worker: index,
        });
        let (host, spin, stop_seen) = (Arc::clone(host), options.spin, Arc::clone(&stop));
        let waker = Arc::downgrade(&stop);
        registry.watch(move || {
            waker.upgrade().is_some_and(|stop| {
                stop.wake();
                true
            })
        });
        let thread = std::thread::Builder::new()
            .name(format!("pass-worker-{}", index.0))
            .spawn(move || work(&host, seat, &registry, spin, &stop_seen.asked))
            .map_err(JoinError::Thread)?;
        Ok(Self { index, stop, thread: Some(thread) })
    }

    /// Its row.
    pub fn index(&self) -> WorkerIndex {
        self.index
    }

    /// Tells it to leave after the pass that it runs. Does not wait for that.
    pub fn stop(&self) {
        self.stop.asked.store(true, Release);
        self.stop.wake();
    }

    /// Tells it to leave, and waits until it has.
    pub fn join(mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic outside of a closure was printed by the thread already.
            let _ = thread.join();
        }
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The closures that a worker has, as it last saw the registry.
struct Repertoire {
    version: u64,
    /// Open addressing by the id's low bits; its length is a power of two, twice the closures.
    places: Vec<Option<(ClosureId, Arc<Closure>)>>,
}

impl Repertoire {
    fn new() -> Self {
        Self { version: u64::MAX, places: vec![None] }
    }

    /// Whether the registry had changed.
    fn refresh(&mut self, registry: &PassRegistry) -> bool {
        let version = registry.version();
        if version == self.version {
            return false;
        }
        let closures = registry.all();
        let length = (2 * closures.len()).next_power_of_two();
        self.places = vec![None; length];
        for (id, closure) in closures {
            let mut place = id.0 as usize & (length - 1);
            while self.places[place].is_some() {
                place = (place + 1) & (length - 1);
            }
            self.places[place] = Some((id, closure.run));
        }
        self.version = version;
        true
    }

    #[inline(always)]
    fn find(&self, id: ClosureId) -> Option<&Arc<Closure>> {
        let mut place = id.0 as usize & (self.places.len() - 1);
        while let Some((found, closure)) = &self.places[place] {
            if *found == id {
                return Some(closure);
            }
            place = (place + 1) & (self.places.len() - 1);
        }
        None
    }
}

/// Says in the worker's row what it runs, so that clients know whom to wake and when to give up.
fn advertise(ring: &PassRing, worker: WorkerIndex, registry: &PassRegistry) {
    let mut runs = [0; PASS_CLOSURES_MAX / 64];
    for (id, closure) in registry.all() {
        match ring.closure_row(id, &closure.name) {
            Some(row) => {
                runs[usize::from(row) / 64] |= 1 << (row % 64);
                let known = ring.closures()[usize::from(row)].name.read();
                // Another worker may have taken the row, and not have written the name yet.
                if !known.is_empty() && known != NameField::cut(&closure.name) {
                    tracing::error!(
                        closure = %closure.name, %known, %id,
                        "two names of closures have one id: rename one, or passes of either run both"
                    );
                }
            }
            None => tracing::error!(
                closure = %closure.name, %id,
                "{PASS_CLOSURES_MAX} closures are known in this directory already: clients will think that nobody runs this one"
            ),
        }
    }
    for (word, bits) in ring.worker(worker).runs.iter().zip(runs) {
        word.store(bits, Release);
    }
}

fn work(
    host: &PassHost,
    mut seat: WorkerSeat,
    registry: &PassRegistry,
    spin: Spin,
    stop: &AtomicBool,
) {
    let ring = Arc::clone(host.ring());
    let worker = seat.index();
    let mut repertoire = Repertoire::new();
    let mut patience = Patience::new(spin);
    while !stop.load(Acquire) {
        if repertoire.refresh(registry) {
            advertise(&ring, worker, registry);
            seat.rewind();
        }
        let has = |id: ClosureId| repertoire.find(id).is_some();
        if let Some(call) = seat.claim(has) {
            patience.found(|| Clock.now());
            if !run(&ring, worker, call, &repertoire, registry) {
                return;
            }
            continue;
        }
        if let Next::Look { pauses } = patience.nothing(|| Clock.now()) {
            pause(pauses);
            continue;
        }
        let row = ring.worker(worker);
        let seen = row.wake_word().load(Acquire);
        ring.board().fall_asleep(worker);
        let call = match seat.claim(has) {
            Some(call) => Some(call),
            None => seat.scan(has),
        };
        if let Some(call) = call {
            // Somebody woke this worker for another pass, which must not wait for the end of this.
            if !ring.board().wake_up(worker) {
                ring.wake_worker(|other| other != worker);
            }
            patience.found(|| Clock.now());
            if !run(&ring, worker, call, &repertoire, registry) {
                return;
            }
        } else {
            if !stop.load(Acquire) && registry.version() == repertoire.version {
                wait(row.wake_word(), seen, PASS_LOOK_EVERY);
            }
            ring.board().wake_up(worker);
        }
    }
    host.leave_worker(seat);
}

/// Runs a call and completes it. False in a child that the closure forked: it is not the worker, and
/// must touch nothing.
#[inline]
fn run(
    ring: &PassRing,
    worker: WorkerIndex,
    mut claimed: ClaimedCall<'_>,
    repertoire: &Repertoire,
    registry: &PassRegistry,
) -> bool {
    let nothing = |status| Reply { status, bytes: 0, cut: false };
    let Ok(call) = claimed.call() else {
        claimed.complete(nothing(Status::Unreadable));
        return true;
    };
    let Some(closure) = repertoire.find(call.closure) else {
        claimed.complete(nothing(Status::Unreadable));
        return true;
    };
    let row = ring.worker(worker);
    if call.timed {
        let limit = claimed.deadline_us();
        row.current().store(u64::from(claimed.pass().slot) + 1, Relaxed);
        row.deadline_us().store(Clock.now().as_micros().saturating_add(limit).max(1), Release);
    }
    let (pass, attempt) = (claimed.pass(), claimed.attempt());
    let (args, mut writer) = claimed.parts();
    let fencing_token = pass.fencing_token(attempt);
    let given = PassCall { args, pass, attempt, fencing_token, registry };
    let ended = catch_unwind(AssertUnwindSafe(|| closure(&given, &mut PassReply(&mut writer))));
    if !ring.is_here() {
        return false;
    }
    let reply = match ended {
        Ok(Ok(())) => returned(&mut writer),
        Ok(Err(error)) => text(Status::Failed, &error, &mut writer),
        Err(panic) => {
            let said = panic_text(panic.as_ref());
            if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                // It panics when it is dropped, and so may what it panics with.
                std::mem::forget(another);
            }
            text(Status::Panicked, &said, &mut writer)
        }
    };
    if call.timed {
        row.deadline_us().store(0, Release);
        row.current().store(0, Relaxed);
    }
    row.finished().store(row.finished().load(Relaxed) + 1, Relaxed);
    claimed.complete(reply);
    true
}

#[inline(always)]
fn returned(writer: &mut ReplyWriter<'_>) -> Reply {
    let offered = writer.offered();
    if offered <= writer.limit() as u64 {
        return Reply { status: Status::Returned, bytes: offered as u32, cut: false };
    }
    writer.clear();
    writer.write(&offered.to_le_bytes());
    Reply { status: Status::TooLong, bytes: 8, cut: false }
}

#[cold]
fn text(status: Status, text: &str, writer: &mut ReplyWriter<'_>) -> Reply {
    let end = text.floor_char_boundary(writer.limit());
    writer.clear();
    writer.write(&text.as_bytes()[..end]);
    Reply { status, bytes: end as u32, cut: end < text.len() }
}
