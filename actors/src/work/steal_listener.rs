//! `StealListener`: the steal port.
//!
//! Owns the TCP listener, one session a connection, the rate limit. Receives connections. Sends
//! [`Surrender`] and [`Settle`] to the deque's owner. Only present members of this mesh are served;
//! a thief is whoever its greeting says, and must be the boot that the member table knows. On death
//! the node stops.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use arc_swap::ArcSwap;
use futures_util::stream;
use meshwork_protocol::id::Owner;
use meshwork_protocol::steal::RateLimit;
use meshwork_protocol::wire::datagram::Sender;
use meshwork_protocol::wire::stream::{Hello, StealFrame, StreamError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::clock::Clock;
use crate::identity::Identity;
use crate::mesh::links::{LinkError, accept, expect_frame, read_frame, write_frame};
use crate::metrics::Metrics;
use crate::subscribers::MemberTable;
use crate::work::deque_owner::{Settle, Surrender};

/// Thieves that are served at once; more wait in the listener's backlog.
const SESSIONS_MAX: usize = 1_024;

/// A thief that says nothing for so long is disconnected.
const SESSION_IDLE: Duration = Duration::from_secs(60);

/// Whom the listener tells.
pub struct Peers {
    /// `DequeOwner`.
    pub surrender: Recipient<Surrender>,
    /// `DequeOwner`.
    pub settle: Recipient<Settle>,
}

/// The actor.
pub struct StealListener {
    identity: Arc<Identity>,
    metrics: Arc<Metrics>,
    table: Arc<ArcSwap<MemberTable>>,
    listener: Option<TcpListener>,
    limit: Rc<RefCell<RateLimit>>,
    sessions: Arc<Semaphore>,
    peers: Rc<Peers>,
}

impl StealListener {
    /// Takes the listener over; called on the arbiter that serves it.
    ///
    /// # Panics
    /// When the listener cannot be registered with the runtime: the node cannot live then.
    pub fn new(
        identity: Arc<Identity>,
        metrics: Arc<Metrics>,
        table: Arc<ArcSwap<MemberTable>>,
        listener: std::net::TcpListener,
        limit: RateLimit,
        peers: Peers,
    ) -> Self {
        let listener =
            TcpListener::from_std(listener).expect("the steal listener joins the runtime");
        Self {
            identity,
            metrics,
            table,
            listener: Some(listener),
            limit: Rc::new(RefCell::new(limit)),
            sessions: Arc::new(Semaphore::new(SESSIONS_MAX)),
            peers: Rc::new(peers),
        }
    }
}

struct Accepted {
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
}

impl Actor for StealListener {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(listener) = self.listener.take() {
            let sessions = self.sessions.clone();
            ctx.add_stream(stream::unfold((listener, sessions), |(listener, sessions)| async {
                let permit = sessions.clone().acquire_owned().await.ok()?;
                let stream = accept(&listener).await;
                Some((Accepted { stream, permit }, (listener, sessions)))
            }));
        }
    }
}

impl StreamHandler<Accepted> for StealListener {
    fn handle(&mut self, Accepted { stream, permit }: Accepted, _: &mut Self::Context) {
        let session = Session {
            identity: self.identity.clone(),
            table: self.table.clone(),
            limit: self.limit.clone(),
            peers: self.peers.clone(),
        };
        let metrics = self.metrics.clone();
        actix::spawn(async move {
            if let Err(error) = session.serve(stream).await {
                metrics.streams_refused.increment();
                tracing::debug!(%error, "a thief was disconnected");
            }
            drop(permit);
        });
    }
}

struct Session {
    identity: Arc<Identity>,
    table: Arc<ArcSwap<MemberTable>>,
    limit: Rc<RefCell<RateLimit>>,
    peers: Rc<Peers>,
}

impl Session {
    async fn serve(&self, mut stream: TcpStream) -> Result<(), LinkError> {
        stream.set_nodelay(true)?;
        let hello: Hello = expect_frame(&mut stream).await?;
        let thief = hello.accept(self.identity.mesh)?;
        while let Ok(frame) = timeout(SESSION_IDLE, read_frame(&mut stream)).await {
            match frame? {
                None => break,
                Some(StealFrame::Request { seq, max, load }) => {
                    let max = if self.may_steal(&thief) { max as usize } else { 0 };
                    let surrender = Surrender { thief: owner(&thief), seq, max, load };
                    // A closed mailbox means that the node is stopping.
                    let Ok(offer) = self.peers.surrender.send(surrender).await else { break };
                    write_frame(&mut stream, &StealFrame::Offer(offer)).await?;
                }
                Some(StealFrame::Settle { offer, taken }) => {
                    self.peers.settle.do_send(Settle { thief: owner(&thief), offer, taken });
                }
                Some(_) => return Err(StreamError::Unexpected("an offer from a thief").into()),
            }
        }
        Ok(())
    }

    fn may_steal(&self, thief: &Sender) -> bool {
        let table = self.table.load();
        let known = table
            .get(&thief.node)
            .is_some_and(|m| m.is_present() && m.generation == thief.generation);
        known && self.limit.borrow_mut().allow(Clock.now(), &thief.node)
    }
}

fn owner(thief: &Sender) -> Owner {
    Owner { node: thief.node.clone(), generation: thief.generation }
}
