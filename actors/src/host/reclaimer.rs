//! Finding the dead and taking their work over. Any process may do it, and several at once do no
//! harm: what is done to a row is done with the row's lock, and each step can be done again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::Duration;

use meshwork_protocol::limits::PASS_GRACE;
use meshwork_protocol::pass::beats::Beats;
use meshwork_protocol::pass::{ClientIndex, PassId, WorkerIndex};
use meshwork_protocol::time::{Instant, micros};

use super::mapped_file::ByteLock;
use super::pass_host::PassHost;
use super::pass_ring::SlotRange;
use super::process::ProcessIdentity;
use crate::clock::Clock;

/// How a watchdog behaves.
#[derive(Clone, Copy, Debug)]
pub struct ReclaimerOptions {
    /// How long a heart stands still before the lock is looked at.
    pub grace: Duration,
    /// How long a dead client's replies wait for a client of its name.
    pub orphans_after: Duration,
}

impl Default for ReclaimerOptions {
    fn default() -> Self {
        Self { grace: PASS_GRACE, orphans_after: Duration::from_secs(60) }
    }
}

/// A worker that came or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSeen {
    /// Its row.
    pub worker: WorkerIndex,
    /// What it is called.
    pub name: String,
    /// Its process.
    pub process: ProcessIdentity,
}

/// What a look brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimReport {
    /// Workers that were not there at the last look.
    pub joined: Vec<WorkerSeen>,
    /// Workers that were there at the last look: dead, or gone by themselves.
    pub lost: Vec<WorkerSeen>,
    /// Rows whose locks were looked at.
    pub probed: u32,
    /// Passes of dead workers that wait again.
    pub requeued: Vec<PassId>,
    /// Passes whose attempts are over.
    pub poisoned: Vec<PassId>,
    /// Passes that waited without a hint.
    pub rehinted: u32,
    /// Clients that were found dead.
    pub clients_lost: u32,
    /// Replies of dead clients that nobody came for.
    pub orphaned: u32,
    /// Workers whose process was killed, because a pass ran past its deadline.
    pub killed: Vec<WorkerSeen>,
    /// Workers with a pass past its deadline whose process cannot be killed from here.
    pub hung: Vec<WorkerSeen>,
}

/// One observer of a directory.
#[derive(Debug)]
pub struct Reclaimer {
    host: Arc<PassHost>,
    options: ReclaimerOptions,
    beats: Beats,
    roster: Option<u64>,
    /// The epoch of each worker's row at the last look, and who held it.
    known: Vec<(u64, Option<WorkerSeen>)>,
    suspects: Vec<usize>,
    /// For each worker, the deadline that was over when it was last told of.
    overdue: Vec<u64>,
}

impl Reclaimer {
    /// An observer that has seen nothing yet.
    pub fn new(host: &Arc<PassHost>, options: ReclaimerOptions) -> Self {
        let geometry = host.ring().layout().geometry;
        let rows = (geometry.workers + geometry.clients) as usize;
        Self {
            host: Arc::clone(host),
            options,
            beats: Beats::new(rows, options.grace),
            roster: None,
            known: vec![(0, None); geometry.workers as usize],
            suspects: Vec::new(),
            overdue: vec![0; geometry.workers as usize],
        }
    }

    /// The workers that were there at the last look.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerSeen> {
        self.known.iter().filter_map(|(_, seen)| seen.as_ref())
    }

    /// Looks at the hearts, and at the locks of those that stand still. Cheap while all beat: no
    /// system call, a load a row.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn look(&mut self, now: Instant, report: &mut ReclaimReport) -> io::Result<()> {
        let mut suspects = std::mem::take(&mut self.suspects);
        self.beats.scan(now, self.host.ring().beats(), |row| suspects.push(row));
        let workers = self.known.len();
        let mut looked = Ok(());
        for row in suspects.drain(..) {
            let probed = match row.checked_sub(workers) {
                None => self.probe_worker(WorkerIndex(row as u16), report),
                Some(client) => self.tend_client(ClientIndex(client as u16), report),
            };
            looked = looked.and(probed);
        }
        self.suspects = suspects;
        self.call_roll(report);
        looked
    }

    /// Looks at a worker's lock, and recovers it if it is dead.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn probe_worker(
        &mut self,
        worker: WorkerIndex,
        report: &mut ReclaimReport,
    ) -> io::Result<()> {
        report.probed += 1;
        let Some(lock) = self.host.lock_worker(worker)? else { return Ok(()) };
        let recovered = self.host.bury_worker(worker, &lock);
        report.requeued.extend(recovered.requeued);
        report.poisoned.extend(recovered.poisoned);
        Ok(())
    }

    /// A process has ended: looks at the locks of its rows.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn process_ended(
        &mut self,
        process: ProcessIdentity,
        report: &mut ReclaimReport,
    ) -> io::Result<()> {
        let ring = Arc::clone(self.host.ring());
        for (index, row) in ring.workers().iter().enumerate() {
            if ProcessIdentity::of(&row.holder) == process {
                self.probe_worker(WorkerIndex(index as u16), report)?;
            }
        }
        for (index, row) in ring.clients().iter().enumerate() {
            if ProcessIdentity::of(&row.holder) == process
                && row.holder.epoch.load(Acquire) % 2 == 1
            {
                self.tend_client(ClientIndex(index as u16), report)?;
            }
        }
        self.call_roll(report);
        Ok(())
    }

    /// Everything that is done now and then: every lock, passes without hints, dead clients' slots.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn tend(&mut self, report: &mut ReclaimReport) -> io::Result<()> {
        let ring = Arc::clone(self.host.ring());
        for (index, row) in ring.workers().iter().enumerate() {
            if row.holder.epoch.load(Acquire) % 2 == 1 {
                self.probe_worker(WorkerIndex(index as u16), report)?;
            }
        }
        let held: Vec<ClientIndex> = (0..)
            .map(ClientIndex)
            .zip(ring.clients())
            .filter(|(_, row)| row.holder.epoch.load(Acquire) % 2 == 1)
            .map(|(client, _)| client)
            .collect();
        // All in one walk over the rings.
        let slots = held.iter().flat_map(|client| ring.range(*client));
        report.rehinted += ring.board().rehint(slots);
        for client in held {
            if let Some(lock) = self.lock_of_dead(client, report)? {
                self.look_after(client, lock, report);
            }
        }
        self.call_roll(report);
        Ok(())
    }

    /// Looks at a client's lock; if it is dead, at what it left.
    fn tend_client(&mut self, client: ClientIndex, report: &mut ReclaimReport) -> io::Result<()> {
        let Some(lock) = self.lock_of_dead(client, report)? else { return Ok(()) };
        let ring = self.host.ring();
        report.rehinted += ring.board().rehint(ring.range(client));
        self.look_after(client, lock, report);
        Ok(())
    }

    fn lock_of_dead(
        &self,
        client: ClientIndex,
        report: &mut ReclaimReport,
    ) -> io::Result<Option<ByteLock>> {
        report.probed += 1;
        self.host.lock_client(client)
    }

    /// What a dead client left, whose passes have their hints.
    fn look_after(&mut self, client: ClientIndex, lock: ByteLock, report: &mut ReclaimReport) {
        let ring = self.host.ring();
        report.clients_lost += u32::from(ring.client(client).left_us().load(Relaxed) == 0);
        self.host.mark_left(client);
        let left_us = ring.client(client).left_us().load(Relaxed);
        let over = left_us.saturating_add(micros(self.options.orphans_after));
        let range = SlotRange::new(Arc::clone(ring), client, lock);
        if Clock.now().as_micros() >= over {
            let mut orphaned = 0;
            if let Some(mut drain) = range.drain() {
                orphaned = drain.collect(true, |_| true);
            }
            ring.header().orphaned.fetch_add(orphaned as u64, AcqRel);
            report.orphaned += orphaned as u32;
        }
        if range.is_all_free() {
            self.host.clear_client(client);
        }
    }

    /// Kills the processes of workers whose pass ran past its deadline. Their work is recovered when
    /// their locks are free, as after any death. Each run is told of once.
    pub fn kill_overdue(&mut self, now: Instant, report: &mut ReclaimReport) {
        let ring = self.host.ring();
        for (index, row) in ring.workers().iter().enumerate() {
            let deadline_us = row.deadline_us().load(Acquire);
            let is_told = self.overdue[index] == deadline_us;
            if deadline_us == 0 || is_told || now.as_micros() <= deadline_us {
                continue;
            }
            let seen = seen(WorkerIndex(index as u16), &self.host);
            // The pass may have ended while the process was looked up.
            if row.deadline_us().load(Acquire) != deadline_us {
                continue;
            }
            self.overdue[index] = deadline_us;
            if seen.process.kill(&self.host.process()) {
                report.killed.push(seen);
            } else {
                report.hung.push(seen);
            }
        }
    }

    /// Says who came and went.
    fn call_roll(&mut self, report: &mut ReclaimReport) {
        let roster = self.host.ring().header().roster.load(Acquire);
        if self.roster == Some(roster) {
            return;
        }
        self.roster = Some(roster);
        for (index, known) in self.known.iter_mut().enumerate() {
            let row = self.host.ring().worker(WorkerIndex(index as u16));
            let epoch = row.holder.epoch.load(Acquire);
            if known.0 == epoch {
                continue;
            }
            report.lost.extend(known.1.take());
            if epoch % 2 == 1 {
                let seen = seen(WorkerIndex(index as u16), &self.host);
                report.joined.push(seen.clone());
                known.1 = Some(seen);
            }
            known.0 = epoch;
        }
    }
}

fn seen(worker: WorkerIndex, host: &PassHost) -> WorkerSeen {
    let row = host.ring().worker(worker);
    WorkerSeen { worker, name: row.name.read(), process: ProcessIdentity::of(&row.holder) }
}

/// Makes the hearts of this process's rows beat.
#[derive(Debug)]
pub struct Heart {
    host: Arc<PassHost>,
    process: ProcessIdentity,
}

impl Heart {
    /// The heart of a host.
    pub fn new(host: &Arc<PassHost>) -> Self {
        Self { host: Arc::clone(host), process: host.process() }
    }

    /// One beat of every row that this process holds.
    pub fn beat(&self) {
        let ring = self.host.ring();
        if !ring.is_here() {
            return;
        }
        let workers = ring.workers().iter().map(|row| &row.holder);
        let clients = ring.clients().iter().map(|row| &row.holder);
        for (holder, beat) in workers.chain(clients).zip(ring.beats()) {
            if holder.epoch.load(Acquire) % 2 == 1
                && ProcessIdentity::of(holder) == self.process
                && beat.load(Relaxed) != 0
            {
                beat.fetch_add(1, Relaxed);
            }
        }
    }
}
