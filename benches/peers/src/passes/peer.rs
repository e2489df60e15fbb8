//! The peer's side: its scheduler as the worker, and its submitter and collector over the same rings.
//!
//! A scheduler always runs a worker thread, so a client that has one competes with its own worker
//! for passes, on processors that the other two threads need. The client here opens the rings
//! without one, which is the peer at its fastest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, anyhow};
use subetha_cxc::{
    BackgroundScheduler, MessageTransport, Pass, ResultCollector, SchedError, SharedRing,
    Submitter, TransportError, pass_registry,
};
use tempfile::TempDir;

use super::Place;
use super::common::process::Process;
use super::common::scenario::Client;
use super::common::shared_directory;
use super::worker::{self, WorkerSide};

/// The arguments of a pass: all that fits beside its head of 10 bytes in a slot of 56.
pub(super) const ARG_BYTES: usize = 46;

/// Slots of each ring, as in its own benchmark: twice what is in flight, so that no result is
/// dropped for want of room.
const RING_SLOTS: usize = 1_024;

/// Rows of the heartbeat table, as in its own benchmark.
const HEARTBEAT_ROWS: usize = 8;

const ECHO: u32 = 1;

/// A client and its worker. Fields are dropped in this order: the worker before its files.
pub(super) struct Peer {
    submitter: Submitter,
    collector: ResultCollector,
    pass: Pass,
    wrong: u64,
    _worker: Worker,
    _directory: TempDir,
}

enum Worker {
    Process { _process: Process },
    Thread { _scheduler: Box<BackgroundScheduler> },
}

struct Paths {
    submit: PathBuf,
    result: PathBuf,
    heartbeat: PathBuf,
}

impl Paths {
    fn of(directory: &Path) -> Self {
        Self {
            submit: directory.join("submit"),
            result: directory.join("result"),
            heartbeat: directory.join("heartbeat"),
        }
    }
}

impl Peer {
    /// Fresh rings, made before the worker starts, since two that make them at once can crash.
    pub(super) fn open(place: Place) -> Result<Self> {
        let directory = shared_directory();
        let paths = Paths::of(directory.path());
        let (submitter, collector, worker) = match place {
            Place::Process => {
                let (submit, result) = (ring(&paths.submit)?, ring(&paths.result)?);
                let process = worker::start(WorkerSide::Peer, directory.path())?;
                (
                    Submitter::new(submit),
                    ResultCollector::new(result),
                    Worker::Process { _process: process },
                )
            }
            Place::Thread => {
                let scheduler = start_worker(directory.path())?;
                (
                    scheduler.submitter(),
                    scheduler.collector(),
                    Worker::Thread { _scheduler: Box::new(scheduler) },
                )
            }
        };
        let pass = Pass { closure_id: ECHO, args: vec![7; ARG_BYTES] };
        Ok(Self { submitter, collector, pass, wrong: 0, _worker: worker, _directory: directory })
    }
}

fn ring(path: &Path) -> Result<Arc<dyn MessageTransport>> {
    let ring = SharedRing::create(path, RING_SLOTS)
        .map_err(|error| anyhow!("the peer cannot make a ring: {error:?}"))?;
    Ok(Arc::new(ring))
}

/// A worker in this process.
pub(super) fn start_worker(directory: &Path) -> Result<BackgroundScheduler> {
    pass_registry::register(ECHO, |args| Ok(args.to_vec()));
    start_scheduler(directory, HEARTBEAT_ROWS)
}

/// A scheduler, with so many rows for heartbeats.
pub(super) fn start_scheduler(directory: &Path, rows: usize) -> Result<BackgroundScheduler> {
    let Paths { submit, result, heartbeat } = Paths::of(directory);
    BackgroundScheduler::start(submit, result, heartbeat, RING_SLOTS, rows)
        .map_err(|error| anyhow!("the peer's scheduler does not start: {error:?}"))
}

impl Client for Peer {
    #[inline]
    fn submit(&mut self) -> bool {
        match self.submitter.submit(&self.pass) {
            Ok(_) => true,
            Err(SchedError::Transport(TransportError::Full)) => false,
            Err(error) => panic!("the peer refused a pass: {error:?}"),
        }
    }

    #[inline]
    fn collect(&mut self) -> u64 {
        let mut collected = 0;
        while let Ok(returned) = self.collector.try_recv() {
            let is_right = returned.result.is_ok_and(|bytes| bytes == self.pass.args);
            self.wrong += u64::from(!is_right);
            collected += 1;
        }
        collected
    }

    fn wrong(&self) -> u64 {
        self.wrong
    }
}
