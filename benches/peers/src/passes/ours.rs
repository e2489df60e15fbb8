//! Our side: one `PassClient`, one `WorkerThread` in this process or in another.

use std::path::Path;

use anyhow::Result;
use meshwork::passes::{PassRegistry, Spin, WorkerThread};
use tempfile::TempDir;

use super::Place;
use super::common::echo::{self, Echoes};
use super::common::process::Process;
use super::common::scenario::Client;
use super::common::shared_directory;
use super::worker::{self, WorkerSide};

/// A client and its worker. Fields are dropped in this order: the worker before its files.
pub(super) struct Ours {
    echoes: Echoes,
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
        let echoes = Echoes::join(directory.path());
        let worker = match place {
            Place::Process => {
                Worker::Process { _process: worker::start(WorkerSide::Ours, directory.path())? }
            }
            Place::Thread => Worker::Thread { _thread: start_worker(directory.path()) },
        };
        Ok(Self { echoes, _worker: worker, _directory: directory })
    }
}

/// A worker in this process.
pub(super) fn start_worker(directory: &Path) -> WorkerThread {
    let registry = PassRegistry::new();
    echo::register(&registry);
    echo::start_worker(directory, registry, Spin::Adaptive)
}

impl Client for Ours {
    #[inline]
    fn submit(&mut self) -> bool {
        self.echoes.submit()
    }

    #[inline]
    fn collect(&mut self) -> u64 {
        self.echoes.collect()
    }

    fn wrong(&self) -> u64 {
        self.echoes.wrong()
    }
}
