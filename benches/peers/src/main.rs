//! The same scenarios on meshwork and on what others run, in one process and one run.
#![forbid(unsafe_code)]

mod faults;
mod hash_ring;
mod mesh;
mod ours;
mod passes;
mod peer;
mod scenario;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "The same scenarios on meshwork and on what others run, in one run.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Membership, stealing and the hash ring, against flexiq-mesh 2.1.0.
    Mesh(mesh::Options),
    /// The hash-ring part of `mesh` alone, which takes a second.
    HashRing {
        /// Run the peer alone.
        #[arg(long)]
        peer_only: bool,
    },
    /// Passes, against subetha-cxc 0.1.12 and `std::sync::mpsc::sync_channel`.
    Passes(passes::Options),
    /// What `passes` runs as its worker processes.
    #[command(hide = true)]
    PassWorker(passes::WorkerOptions),
    /// The faults of flexiq-mesh 2.1.0 that we claim to be immune to, each shown on its public API.
    Faults,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Mesh(options) => mesh::run(&options),
        Command::HashRing { peer_only } => mesh::run_hash_ring(peer_only),
        Command::Passes(options) => passes::run(&options),
        Command::PassWorker(options) => passes::run_worker(&options),
        Command::Faults => faults::run(),
    }
}
