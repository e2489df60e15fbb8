//! The worker processes: this program, run again.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use tempfile::TempDir;

use super::{ours, peer};

/// Whose worker.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum WorkerSide {
    Ours,
    Peer,
}

/// How a worker process is told what to do.
#[derive(Args)]
pub(crate) struct Options {
    #[arg(value_enum)]
    side: WorkerSide,
    directory: PathBuf,
}

const READY: &str = "ready";

/// Works until stdin ends, which it does with the process that started this one.
pub(crate) fn run(options: &Options) -> Result<()> {
    match options.side {
        WorkerSide::Ours => wait_with(ours::start_worker(&options.directory)?),
        WorkerSide::Peer => wait_with(peer::start_worker(&options.directory)?),
    }
}

fn wait_with<W>(_worker: W) -> Result<()> {
    println!("{READY}");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A worker in a process of its own. Killed when dropped.
pub(super) struct WorkerProcess(Child);

impl WorkerProcess {
    /// Starts it, and waits until it has joined.
    pub(super) fn spawn(side: WorkerSide, directory: &Path) -> Result<Self> {
        let side = side.to_possible_value().context("a side has a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["pass-worker", side.get_name()])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the worker process does not start")?;
        let stdout = child.stdout.take().context("its stdout is piped")?;
        let worker = Self(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line.trim_end() == READY, "the worker process did not come up");
        Ok(worker)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory in memory, gone when dropped.
pub(super) fn shared_directory() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("meshwork-peers-")
        .tempdir_in("/dev/shm")
        .context("no directory in /dev/shm")
}
