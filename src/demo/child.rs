//! A node of the demo: a process that speaks by its pipes, and exits when its stdin ends.

use std::io::{self, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::System;
use meshwork::{Mesh, NodeId, StartError, Store};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::cli::ndjson::{read_line_blocking, write_line};
use crate::cli::protocol::{Peer, Said};
use crate::cli::service::{Outlet, Service, addresses};
use crate::cli::{digest, socket};
use crate::demo::links::LinkTable;
use crate::demo::regions;

/// Requests that wait to be answered: many times what the parent has unanswered.
const REQUESTS_MAX: usize = 1_024;
/// Lines that wait for the parent to read them.
const LINES_MAX: usize = 1_024;

/// How a node of the demo is set up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) id: NodeId,
    pub(crate) mesh: String,
    pub(crate) db: PathBuf,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) slots: usize,
    pub(crate) buffer: usize,
    pub(crate) stealing: bool,
    pub(crate) steal_threshold: usize,
    pub(crate) max_steal_batch: usize,
    /// Steals a second from one peer; 0: no limit.
    pub(crate) steal_rate_limit: u32,
    pub(crate) lease_ms: u64,
    pub(crate) protocol_period_ms: u64,
    /// Whether links between regions are slow.
    pub(crate) latency: bool,
}

/// Runs the node until its stdin ends.
pub(crate) fn run(setup: &str) -> ExitCode {
    let setup: Setup = match serde_json::from_str(setup) {
        Ok(setup) => setup,
        Err(e) => {
            eprintln!(
                "demo-node: the setup does not read: {e}; `meshwork demo` starts this command"
            );
            return ExitCode::from(2);
        }
    };
    System::new().block_on(live(setup))
}

async fn live(setup: Setup) -> ExitCode {
    let mut requests = read_requests();
    let (outlet, lines) = mpsc::channel(LINES_MAX);
    actix::spawn(write_lines(lines));
    let links = LinkTable::default();
    let mesh = match start(&setup, &links).await {
        Ok(mesh) => mesh,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let service = service(&setup, &mesh, links);
    if let Some(path) = &setup.socket {
        match socket::bind(path).await {
            Ok(socket) => {
                actix::spawn(socket::serve(socket, service.clone()));
            }
            // The demo goes on without: nothing but a person asks there.
            Err(error) => tracing::warn!(%error, "no socket"),
        }
    }
    let (gossip, steal) = addresses(&mesh);
    let ready = Said::Ready { id: setup.id.clone(), gossip, steal };
    if outlet.send(ready).await.is_err() {
        return ExitCode::FAILURE;
    }
    tokio::select! {
        () = answer(&service, &mut requests, &outlet) => ExitCode::SUCCESS,
        reason = mesh.stopped() => {
            eprintln!("the node has stopped: {reason}");
            ExitCode::FAILURE
        }
    }
}

async fn start(setup: &Setup, links: &LinkTable) -> Result<Mesh, StartError> {
    let mut builder = Mesh::builder(setup.id.as_str())
        .mesh_name(&setup.mesh)
        .bind("127.0.0.1:0")
        .store(Store::sqlite(&setup.db))
        .job(digest::handle)
        .slots(setup.slots)
        .buffer(setup.buffer)
        .stealing(setup.stealing)
        .steal_threshold(setup.steal_threshold)
        .max_steal_batch(setup.max_steal_batch)
        .steal_rate_limit(setup.steal_rate_limit)
        .lease_term(Duration::from_millis(setup.lease_ms))
        .protocol_period(Duration::from_millis(setup.protocol_period_ms));
    if setup.latency {
        builder = builder.links(Arc::new(links.clone()));
    }
    builder.start().await
}

/// Joins when the parent says who there is, and not before: by then the links are slow.
fn service(setup: &Setup, mesh: &Mesh, links: LinkTable) -> Service {
    let me = setup.id.clone();
    let joiner = mesh.clone();
    let start = move |peers: Vec<Peer>, seeds: Vec<String>| {
        for Peer { region, gossip, steal } in peers {
            let Some(one_way) = regions::one_way(me.as_str(), &region) else { continue };
            if region != me.as_str() {
                let both: [SocketAddr; 2] = [gossip, steal];
                both.into_iter().for_each(|addr| links.set(addr, one_way));
            }
        }
        if let Err(error) = joiner.join(seeds) {
            tracing::error!(%error, "the parent named a seed that is none");
        }
    };
    Service::with_start(mesh.clone(), Rc::new(start))
}

async fn answer(service: &Service, requests: &mut mpsc::Receiver<Vec<u8>>, outlet: &Outlet) {
    while let Some(line) = requests.recv().await {
        service.answer_line(&line, outlet).await;
    }
}

/// Reads on a thread of its own, so that the end of stdin ends the process whatever else it does.
fn read_requests() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(REQUESTS_MAX);
    let read = move || {
        let mut stdin = BufReader::new(io::stdin());
        let mut line = Vec::new();
        let code = loop {
            match read_line_blocking(&mut stdin, &mut line) {
                Ok(Some(())) if sender.try_send(line.clone()).is_ok() => {}
                Ok(Some(())) => {
                    eprintln!("more than {REQUESTS_MAX} requests wait");
                    break 1;
                }
                Ok(None) => break 0,
                Err(e) => {
                    eprintln!("stdin: {e}");
                    break 1;
                }
            }
        };
        std::process::exit(code);
    };
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(read)
        .expect("a process that has just begun can start a thread");
    receiver
}

async fn write_lines(mut lines: mpsc::Receiver<Said>) {
    let mut stdout = tokio::io::stdout();
    while let Some(said) = lines.recv().await {
        if write_line(&mut stdout, &said).await.is_err() {
            // The parent is gone, and its end of stdin with it.
            return;
        }
    }
}
