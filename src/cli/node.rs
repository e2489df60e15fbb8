//! `meshwork node`: one node from flags, until a signal.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use actix::System;
use meshwork::{Mesh, Store};

use crate::cli::args::NodeArgs;
use crate::cli::digest;
use crate::cli::service::Service;
use crate::cli::signals::{self, Signals};
use crate::cli::socket;

/// Runs the node.
pub(crate) fn run(args: NodeArgs) -> ExitCode {
    match System::new().block_on(live(args)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn live(args: NodeArgs) -> Result<ExitCode, String> {
    // From here on a signal ends the node in order, also while it starts.
    let mut signals = Signals::new().map_err(|e| format!("signals: {e}"))?;
    let path = args.socket.clone().unwrap_or_else(|| socket::default_path(&args.id));
    let socket = socket::bind(&path).await.map_err(|e| e.to_string())?;
    let drain = args.drain;
    let mesh = tokio::select! {
        mesh = start(args) => mesh?,
        signal = signals.next() => return Ok(ExitCode::from(signals::exit_status(signal))),
    };
    say(&format!(
        "{}: generation {}, gossip {}, steal {}, socket {}",
        mesh.id(),
        mesh.generation(),
        mesh.gossip_addr(),
        mesh.steal_addr(),
        socket.path().display(),
    ));
    // Removed with the future, before this returns.
    let serve = socket::serve(socket, Service::new(mesh.clone()));
    let ended = async {
        tokio::select! {
            signal = signals.next() => Ok(signal),
            reason = mesh.stopped() => Err(reason),
        }
    };
    tokio::select! {
        () = serve => Err("the socket is no longer served".into()),
        ended = ended => match ended {
            Err(reason) => Err(format!("the node has stopped: {reason}")),
            Ok(_) => Ok(leave(&mesh, drain, &mut signals).await),
        },
    }
}

async fn start(args: NodeArgs) -> Result<Mesh, String> {
    let mut builder = Mesh::builder(args.id.as_str())
        .mesh_name(args.mesh)
        .bind(args.bind)
        .seeds(args.seeds)
        .store(Store::sqlite(args.db))
        .job(digest::handle)
        .slots(usize::from(args.slots))
        .buffer(args.buffer as usize)
        .stealing(!args.no_steal);
    if let Some(advertise) = args.advertise {
        builder = builder.advertise(advertise);
    }
    if args.insecure {
        builder = builder.insecure();
    }
    builder.start().await.map_err(|e| e.to_string())
}

async fn leave(mesh: &Mesh, limit: Duration, signals: &mut Signals) -> ExitCode {
    say(&format!("draining for {} s at most; a second signal stops it at once", limit.as_secs()));
    tokio::select! {
        report = mesh.drain(limit) => {
            let jobs = if report.finished { "all running jobs have ended" } else { "running jobs were cut off" };
            say(&format!("left: {jobs}, {} waiting jobs were given back", report.released));
            ExitCode::SUCCESS
        }
        signal = signals.next() => ExitCode::from(signals::exit_status(signal)),
    }
}

/// A node lives whether or not anyone reads what it says.
fn say(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}
