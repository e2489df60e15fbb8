//! `Overseer`: decides when a node must stop, and why.
//!
//! Owns the node's condition. Receives [`NodeNotice`] from the membership store, and the ends of
//! actors. Sends [`RegisterAgain`] to the lease keeper, and publishes whether the node has joined and
//! whether it must stop. On death the node stops, for the channel that says so closes.

use std::net::SocketAddr;

use actix::prelude::*;
use meshwork_protocol::id::Generation;
use tokio::sync::{mpsc, watch};

use crate::mesh::membership_store::NodeNotice;
use crate::start::Death;
use crate::work::lease_keeper::RegisterAgain;

/// Why a node stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// It was drained.
    Drained,
    /// Another live node has its id.
    IdInUse {
        /// Where that one answers.
        holder: SocketAddr,
    },
    /// A newer boot of its id is in the mesh.
    Fenced {
        /// The newer one.
        by: Generation,
    },
    /// One of its actors ended.
    ActorDied {
        /// Its type.
        actor: String,
        /// What it said.
        reason: String,
    },
    /// Its `System` ended.
    SystemEnded,
}

impl std::fmt::Display for StopReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Drained => f.write_str("it was drained"),
            Self::IdInUse { holder } => {
                write!(f, "a live node at {holder} has this id: choose another, or stop that one")
            }
            Self::Fenced { by } => {
                write!(f, "a newer boot of this id, generation {by}, has joined")
            }
            Self::ActorDied { actor, reason } => write!(f, "its {actor} ended: {reason}"),
            Self::SystemEnded => f.write_str("its System ended"),
        }
    }
}

/// How far a node has come with its seeds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Joining {
    /// A seed has answered.
    pub joined: bool,
    /// The seeds that did not answer at their last try, and why.
    pub unreachable: Vec<(String, String)>,
}

/// The actor.
pub struct Overseer {
    stop: watch::Sender<Option<StopReason>>,
    joining: watch::Sender<Joining>,
    deaths: Option<mpsc::UnboundedReceiver<Death>>,
    register: Recipient<RegisterAgain>,
}

impl Overseer {
    /// Publishes in `stop` and `joining` what it learns from `deaths` and from notices.
    pub fn new(
        stop: watch::Sender<Option<StopReason>>,
        joining: watch::Sender<Joining>,
        deaths: mpsc::UnboundedReceiver<Death>,
        register: Recipient<RegisterAgain>,
    ) -> Self {
        Self { stop, joining, deaths: Some(deaths), register }
    }

    /// The first reason counts.
    fn stop(&self, reason: StopReason) {
        self.stop.send_if_modified(|stop| {
            let first = stop.is_none();
            if first {
                *stop = Some(reason);
            }
            first
        });
    }
}

impl Actor for Overseer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(mut deaths) = self.deaths.take() {
            ctx.add_stream(futures_util::stream::poll_fn(move |cx| deaths.poll_recv(cx)));
        }
    }
}

impl StreamHandler<Death> for Overseer {
    fn handle(&mut self, Death { actor, reason }: Death, _: &mut Self::Context) {
        self.stop(StopReason::ActorDied { actor: actor.into(), reason });
    }

    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<NodeNotice> for Overseer {
    type Result = ();

    fn handle(&mut self, notice: NodeNotice, _: &mut Self::Context) {
        match notice {
            NodeNotice::GenerationTooLow { at_least } => {
                self.register.do_send(RegisterAgain { at_least });
            }
            NodeNotice::Fenced { by } => self.stop(StopReason::Fenced { by }),
            NodeNotice::Refused { holder } => self.stop(StopReason::IdInUse { holder }),
            NodeNotice::Joined => self.joining.send_modify(|joining| {
                joining.joined = true;
                joining.unreachable.clear();
            }),
            NodeNotice::SeedUnreachable { seed, reason } => {
                tracing::warn!(seed, reason, "a seed does not answer; it is tried again");
                self.joining.send_modify(|joining| {
                    joining.unreachable.retain(|(known, _)| *known != seed);
                    joining.unreachable.push((seed, reason));
                });
            }
        }
    }
}
