//! The worker processes: this program, run again.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use super::common::process::{Process, ready_until_the_end};
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

/// Works until the process that started this one ends.
pub(crate) fn run(options: &Options) -> Result<()> {
    match options.side {
        WorkerSide::Ours => wait_with(ours::start_worker(&options.directory)),
        WorkerSide::Peer => wait_with(peer::start_worker(&options.directory)?),
    }
    Ok(())
}

fn wait_with<W>(_worker: W) {
    ready_until_the_end();
}

/// Starts a process that works for a side, and waits until it has joined.
pub(super) fn start(side: WorkerSide, directory: &Path) -> Result<Process> {
    let side = side.to_possible_value().context("a side has a name")?;
    let args = ["pass-worker".into(), side.get_name().into(), directory.into()];
    Ok(Process::start(&args))
}
