//! Our side: one `PassClient`, one `WorkerThread` in this process or in another.

use std::path::Path;

use anyhow::Result;
use meshwork::actors::host::pass::{Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::registry::PassRegistry;
use meshwork::actors::host::worker_thread::{WorkerOptions, WorkerThread};
use meshwork::passes::Spin;
use tempfile::TempDir;

use super::common::process::Process;
use super::common::shared_directory;
use super::scenario::{Client, Place};
use super::worker::{self, WorkerSide};

/// The arguments of a pass, and its result.
pub(super) const ARG_BYTES: usize = 48;

const ECHO: &str = "echo";

/// A client and its worker. Fields are dropped in this order: the worker before its files.
pub(super) struct Ours {
    client: PassClient,
    pass: Pass<'static>,
    wrong: u64,
    _worker: Worker,
    _directory: TempDir,
}

enum Worker {
    Process { _process: Process },
    Thread { _thread: WorkerThread },
}

impl Ours {
    /// A fresh directory, a client of it, and a worker that sleeps and spins as it does by default.
    pub(super) fn open(place: Place) -> Result<Self> {
        let directory = shared_directory();
        let host = PassHost::open(directory.path(), None)?;
        let worker = match place {
            Place::Process => {
                Worker::Process { _process: worker::start(WorkerSide::Ours, directory.path())? }
            }
            Place::Thread => Worker::Thread { _thread: start_worker(directory.path())? },
        };
        let client = PassClient::join(
            &host,
            ClientOptions { name: "bench".to_owned(), ..Default::default() },
        )?;
        let pass = Pass::named(ECHO, vec![7; ARG_BYTES]);
        Ok(Self { client, pass, wrong: 0, _worker: worker, _directory: directory })
    }
}

/// A worker in this process.
pub(super) fn start_worker(directory: &Path) -> Result<WorkerThread> {
    let registry = PassRegistry::new();
    registry.register_writing(ECHO, |call, reply| {
        reply.write(call.args);
        Ok::<_, String>(())
    })?;
    let options = WorkerOptions { name: "bench".to_owned(), spin: Spin::Adaptive };
    Ok(WorkerThread::spawn(&PassHost::open(directory, None)?, registry, &options)?)
}

impl Client for Ours {
    #[inline]
    fn submit(&mut self) -> bool {
        match self.client.submit(&self.pass) {
            Ok(_) => true,
            Err(SubmitError::Busy(_)) => false,
            Err(error) => panic!("a pass was refused: {error}"),
        }
    }

    #[inline]
    fn collect(&mut self) -> u64 {
        let (wrong, args) = (&mut self.wrong, &self.pass.args);
        self.client.poll(|completion| {
            let is_right =
                matches!(&completion.outcome, PassOutcome::Returned(bytes) if bytes == args);
            *wrong += u64::from(!is_right);
        }) as u64
    }

    fn wrong(&self) -> u64 {
        self.wrong
    }
}
