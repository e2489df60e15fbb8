//! A process's part in the passes of a directory: joining and leaving, as a client, as a worker, as
//! one who recovers the dead.
//!
//! The lock of a row is taken before anything of the row is touched, and whoever takes a worker's
//! lock recovers the worker before it does anything else: its predecessor in the row may have died.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use meshwork_protocol::limits::PASS_NAME_BYTES_MAX;
use meshwork_protocol::pass::board::Recovered;
use meshwork_protocol::pass::layout::{Geometry, Layout};
use meshwork_protocol::pass::succession::Choice;
use meshwork_protocol::pass::{ClientIndex, WorkerIndex};

use super::mapped_file::{ByteLock, LOCK_NAME, LockFile, MappedFile, OpenError, prepare_directory};
use super::pass_ring::{Holder, PassRing, SlotRange, WorkerRow, WorkerSeat};
use super::process::ProcessIdentity;
use super::snapshot::PassSnapshot;
use crate::clock::Clock;

/// Where the workers' bytes begin in the lock file.
pub(super) const WORKER_BYTES: u64 = 0;
/// Where the clients' begin.
pub(super) const CLIENT_BYTES: u64 = 1 << 20;

/// How long a client waits for a watchdog that looks at what its predecessor left. That takes
/// microseconds, unless the watchdog is stopped in the middle.
const TENDING_PATIENCE: Duration = Duration::from_secs(5);

/// The first beat of a row: any but none.
const FIRST_BEAT: u64 = 1;

/// Why a process cannot join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Every row is held by a living process.
    #[error("all {rows} places for {role} are taken by living processes")]
    Full {
        /// "workers" or "clients".
        role: &'static str,
        /// How many there are.
        rows: u32,
    },
    /// The lock file cannot be used.
    #[error("cannot lock a place for {role}: {source}")]
    Lock {
        /// "workers" or "clients".
        role: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A client's name that is longer than a row has room for: cut, it would be another's.
    #[error("the client's name has {0} bytes, and {PASS_NAME_BYTES_MAX} fit")]
    LongName(usize),
    /// This process was forked from the one that opened the directory.
    #[error("this process was forked from the one that opened the passes: open them here anew")]
    Forked,
    /// The thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl JoinError {
    /// Whether trying again later may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::Thread(_))
    }
}

/// The passes of a directory, open in this process.
#[derive(Debug)]
pub struct PassHost {
    ring: Arc<PassRing>,
    locks: Arc<LockFile>,
    process: ProcessIdentity,
}

impl PassHost {
    /// Opens the passes of a directory, and makes what is not there. With a `geometry`, the file must
    /// be made for it; without, one that is there is taken as it is.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(directory: &Path, geometry: Option<Geometry>) -> Result<Arc<Self>, OpenError> {
        prepare_directory(directory)?;
        let locks = LockFile::open(&directory.join(LOCK_NAME))?;
        let file = MappedFile::open(directory, geometry, &locks)?;
        Ok(Self::over(PassRing::mapped(file), locks))
    }

    /// A host over a ring in this process's own memory, and locks for it.
    pub fn on_heap(layout: Layout, locks: Arc<LockFile>) -> Arc<Self> {
        Self::over(PassRing::on_heap(layout), locks)
    }

    fn over(ring: PassRing, locks: Arc<LockFile>) -> Arc<Self> {
        Arc::new(Self { ring: Arc::new(ring), locks, process: ProcessIdentity::this() })
    }

    /// Looks at the passes of a directory without joining them: makes nothing, locks nothing, writes
    /// nothing, and so disturbs nobody.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::Nothing`] where there is nothing to look at.
    pub fn look(directory: &Path) -> Result<PassSnapshot, OpenError> {
        let file = MappedFile::look(directory)?;
        let path = directory.join(LOCK_NAME);
        let locks = LockFile::look(&path)?;
        let is_of = locks.is_of(file.header().instance_id);
        if !is_of.map_err(|source| OpenError::Io { doing: "read", path: path.clone(), source })? {
            return Err(OpenError::LocksReplaced { path });
        }
        let ring = PassRing::mapped(file);
        PassSnapshot::take(&ring, &locks).map_err(|source| OpenError::Io {
            doing: "look at the locks of",
            path,
            source,
        })
    }

    /// What is there now, as [`look`](Self::look) sees it.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn snapshot(&self) -> io::Result<PassSnapshot> {
        PassSnapshot::take(&self.ring, &self.locks)
    }

    /// The memory.
    pub fn ring(&self) -> &Arc<PassRing> {
        &self.ring
    }

    /// This process.
    pub fn process(&self) -> ProcessIdentity {
        self.process
    }

    /// The lock of a worker's row; `None` while it is alive. A row of this process is.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn lock_worker(&self, worker: WorkerIndex) -> io::Result<Option<ByteLock>> {
        self.locks.try_lock(WORKER_BYTES + u64::from(worker.0))
    }

    /// The lock of a client's row; `None` while it is alive.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn lock_client(&self, client: ClientIndex) -> io::Result<Option<ByteLock>> {
        self.locks.try_lock(CLIENT_BYTES + u64::from(client.0))
    }

    /// Joins as a worker that is called `name`.
    ///
    /// # Errors
    ///
    /// [`JoinError`].
    pub fn join_worker(&self, name: &str) -> Result<WorkerSeat, JoinError> {
        let role = "workers";
        if !self.ring.is_here() {
            return Err(JoinError::Forked);
        }
        let rows = self.ring.layout().geometry.workers;
        for index in 0..rows as u16 {
            let index = WorkerIndex(index);
            let lock =
                self.lock_worker(index).map_err(|source| JoinError::Lock { role, source })?;
            let Some(lock) = lock else { continue };
            self.bury_worker(index, &lock);
            let row = self.ring.worker(index);
            row.name.write(name);
            self.take_row(&row.holder);
            self.ring.beats()[usize::from(index.0)].store(FIRST_BEAT, Release);
            return Ok(WorkerSeat::new(Arc::clone(&self.ring), index, lock));
        }
        Err(JoinError::Full { role, rows })
    }

    fn take_row(&self, holder: &Holder) {
        self.process.write(holder);
        holder.joined_us.store(Clock.now().as_micros(), Relaxed);
        // The next odd number: a row that changes hands never keeps its epoch.
        let epoch = holder.epoch.load(Relaxed);
        holder.epoch.store(epoch + 1 + epoch % 2, Release);
        self.ring.header().roster.fetch_add(1, AcqRel);
    }

    /// Recovers what the row's last holder had claimed, and frees the row. With its lock.
    pub fn bury_worker(&self, worker: WorkerIndex, lock: &ByteLock) -> Recovered {
        let row = self.ring.worker(worker);
        let recovered = self.ring.recover_worker(worker, lock);
        let header = self.ring.header();
        header.requeued.fetch_add(recovered.requeued.len() as u64, AcqRel);
        header.poisoned.fetch_add(recovered.poisoned.len() as u64, AcqRel);
        // A sleeper that died may have taken a wake with it, and what waits again is for anyone. Each
        // row once: whoever is woken and finds nothing falls asleep again, and would be woken for ever.
        let next = Cell::new(0);
        let is_next = |sleeper: WorkerIndex| {
            let is_later = sleeper.0 >= next.get();
            if is_later {
                next.set(sleeper.0 + 1);
            }
            is_later
        };
        while self.ring.wake_worker(is_next) {}
        self.clear_worker(worker, row);
        recovered
    }

    fn clear_worker(&self, worker: WorkerIndex, row: &WorkerRow) {
        row.deadline_us().store(0, Relaxed);
        row.current().store(0, Relaxed);
        row.finished().store(0, Relaxed);
        for word in &row.runs {
            word.store(0, Relaxed);
        }
        self.ring.beats()[usize::from(worker.0)].store(0, Release);
        free_row(&row.holder);
        self.ring.header().roster.fetch_add(1, AcqRel);
    }

    /// A worker leaves, with nothing claimed.
    pub fn leave_worker(&self, seat: WorkerSeat) {
        if self.ring.is_here() {
            // Somebody may have woken this one for a pass that it will not take.
            let leaving = seat.index();
            self.ring.wake_up(leaving);
            self.ring.wake_worker(|other| other != leaving);
            self.clear_worker(seat.index(), seat.row());
        }
        drop(seat);
    }

    /// Joins as a client that is called `name`: takes the range of a dead client of that name before
    /// a clean one, and a clean one before that of another dead client.
    ///
    /// # Errors
    ///
    /// [`JoinError`].
    pub fn join_client(&self, name: &str) -> Result<SlotRange, JoinError> {
        let role = "clients";
        if !self.ring.is_here() {
            return Err(JoinError::Forked);
        }
        if name.len() > PASS_NAME_BYTES_MAX {
            return Err(JoinError::LongName(name.len()));
        }
        let rows = self.ring.layout().geometry.clients;
        for choice in Choice::ALL {
            for index in 0..rows as u16 {
                let index = ClientIndex(index);
                let row = self.ring.client(index);
                let is_wanted = || {
                    let has_leftovers = row.holder.epoch.load(Acquire) % 2 == 1;
                    choice.takes(name, has_leftovers, || row.name.read())
                };
                if !is_wanted() {
                    continue;
                }
                let lock = self
                    .lock_row(index, is_wanted)
                    .map_err(|source| JoinError::Lock { role, source })?;
                let Some(lock) = lock else { continue };
                // Another may have had it between the look and the lock.
                if !is_wanted() {
                    continue;
                }
                self.ring.board().rehint(self.ring.range(index));
                if choice.disowns() {
                    // Before the row has the name: a later client of it must not adopt them.
                    self.ring.disown(index);
                }
                row.name.write(name);
                row.left_us().store(0, Relaxed);
                row.collected().store(0, Relaxed);
                row.sleeping().store(0, Relaxed);
                self.take_row(&row.holder);
                self.ring.beats()[self.client_beat(index)].store(FIRST_BEAT, Release);
                return Ok(SlotRange::new(Arc::clone(&self.ring), index, lock));
            }
        }
        Err(JoinError::Full { role, rows })
    }

    /// The lock of a client's row, also where a watchdog has it in this moment: whoever passed by
    /// would never be told what its predecessor's passes came to. `None` while the client is alive.
    fn lock_row(
        &self,
        client: ClientIndex,
        is_wanted: impl Fn() -> bool,
    ) -> io::Result<Option<ByteLock>> {
        let holder = &self.ring.client(client).holder;
        let begun = Instant::now();
        loop {
            if let Some(lock) = self.lock_client(client)? {
                return Ok(Some(lock));
            }
            // Its process is gone, or it has left: also within this process.
            let is_over = || {
                self.ring.client(client).left_us().load(Relaxed) != 0
                    || ProcessIdentity::of(holder).is_gone(&self.process)
            };
            let is_tended = holder.epoch.load(Acquire) % 2 == 1 && is_wanted() && is_over();
            if !is_tended || begun.elapsed() >= TENDING_PATIENCE {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Where a client's beat is in the table.
    pub fn client_beat(&self, client: ClientIndex) -> usize {
        self.ring.layout().geometry.workers as usize + usize::from(client.0)
    }

    /// Frees the row of a client of which nothing is left. With its lock.
    pub(super) fn clear_client(&self, client: ClientIndex) {
        let row = self.ring.client(client);
        row.name.write("");
        row.left_us().store(0, Relaxed);
        self.ring.beats()[self.client_beat(client)].store(0, Release);
        free_row(&row.holder);
        self.ring.header().roster.fetch_add(1, AcqRel);
    }

    /// Marks the row of a client that is gone and of which something is left. With its lock.
    pub(super) fn mark_left(&self, client: ClientIndex) {
        let row = self.ring.client(client);
        if row.left_us().load(Relaxed) == 0 {
            row.left_us().store(Clock.now().as_micros().max(1), Relaxed);
            self.ring.beats()[self.client_beat(client)].store(0, Release);
            self.ring.header().roster.fetch_add(1, AcqRel);
        }
    }
}

fn free_row(holder: &Holder) {
    let epoch = holder.epoch.load(Relaxed);
    holder.epoch.store(epoch + epoch % 2, Release);
}
