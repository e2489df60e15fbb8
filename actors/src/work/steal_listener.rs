//! `StealListener`: the steal port.
//!
//! Owns the TCP listener, one session a connection, the rate limit. Receives connections. Sends
//! [`Surrender`] and [`Settle`] to the deque's owner. Only present members of this mesh are served;
//! a thief is whoever its greeting says, and must be the boot that the member table knows. Anyone
//! else is answered with an empty offer that the deque's owner never hears of, and so is everyone on
//! a node that is not stolen from. On death the node stops.

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
use meshwork_protocol::wire::stream::{Hello, Offer, StealFrame, StreamError};
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
    serves: bool,
    peers: Rc<Peers>,
}

impl StealListener {
    /// Takes the listener over; called on the arbiter that serves it. Unless it `serves`, no thief
    /// gets anything.
    ///
    /// # Panics
    /// When the listener cannot be registered with the runtime: the node cannot live then.
    pub fn new(
        identity: Arc<Identity>,
        metrics: Arc<Metrics>,
        table: Arc<ArcSwap<MemberTable>>,
        listener: std::net::TcpListener,
        limit: RateLimit,
        serves: bool,
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
            serves,
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
            serves: self.serves,
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
    serves: bool,
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
                    let offer = if self.serves && self.is_present(&thief) {
                        let allowed = self.limit.borrow_mut().allow(Clock.now(), &thief.node);
                        let max = if allowed { max as usize } else { 0 };
                        let surrender = Surrender { thief: owner(&thief), seq, max, load };
                        // A closed mailbox means that the node is stopping.
                        let Ok(offer) = self.peers.surrender.send(surrender).await else { break };
                        offer
                    } else {
                        nothing(seq)
                    };
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

    fn is_present(&self, thief: &Sender) -> bool {
        let table = self.table.load();
        table.get(&thief.node).is_some_and(|m| m.is_present() && m.generation == thief.generation)
    }
}

fn nothing(seq: u32) -> Offer {
    Offer { seq, offer: 0, expires_ms: 0, jobs: Vec::new(), load: None }
}

fn owner(thief: &Sender) -> Owner {
    Owner { node: thief.node.clone(), generation: thief.generation }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use meshwork_protocol::id::{Generation, Incarnation, NodeId};
    use meshwork_protocol::load::Load;
    use meshwork_protocol::swim::{Member, MemberState};
    use meshwork_protocol::time::Instant;
    use meshwork_protocol::wire::datagram::MeshId;

    use super::*;
    use crate::identity::Lease;

    /// Offers the number of jobs that it may surrender, as the number of an offer.
    struct Victim;

    impl Actor for Victim {
        type Context = Context<Self>;
    }

    impl Handler<Surrender> for Victim {
        type Result = MessageResult<Surrender>;

        fn handle(&mut self, surrender: Surrender, _: &mut Self::Context) -> Self::Result {
            MessageResult(Offer { offer: surrender.max as u64, ..nothing(surrender.seq) })
        }
    }

    impl Handler<Settle> for Victim {
        type Result = ();

        fn handle(&mut self, _: Settle, _: &mut Self::Context) {}
    }

    const MESH: MeshId = MeshId(1);

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn present(name: &str, generation: u64) -> Member {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        Member {
            id: node(name),
            generation: Generation(generation),
            incarnation: Incarnation::default(),
            state: MemberState::Alive,
            gossip: addr,
            steal: addr,
        }
    }

    fn listen(serves: bool) -> SocketAddr {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        let table = MemberTable { epoch: 1, members: Arc::from([present("thief", 7)]) };
        let victim = Victim.start();
        let lease = Lease { generation: Generation(1), deadline: Instant::FAR_FUTURE };
        StealListener::new(
            Arc::new(Identity::new(MESH, node("victim"), addr, lease)),
            Arc::default(),
            Arc::new(ArcSwap::from_pointee(table)),
            listener,
            RateLimit::new(1),
            serves,
            Peers { surrender: victim.clone().recipient(), settle: victim.recipient() },
        )
        .start();
        addr
    }

    /// The answers to two requests for four jobs.
    async fn ask_twice(addr: SocketAddr, thief: &str, generation: u64) -> [Offer; 2] {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let from = Sender { node: node(thief), generation: Generation(generation) };
        write_frame(&mut stream, &Hello::new(MESH, from)).await.unwrap();
        let mut offers = Vec::new();
        for seq in [5, 6] {
            let request = StealFrame::Request { seq, max: 4, load: Load::default() };
            write_frame(&mut stream, &request).await.unwrap();
            match expect_frame(&mut stream).await.unwrap() {
                StealFrame::Offer(offer) => offers.push(offer),
                other => panic!("{other:?}"),
            }
        }
        offers.try_into().unwrap()
    }

    #[actix::test]
    async fn a_member_is_served_and_once_too_often_politely_refused() {
        let offers = ask_twice(listen(true), "thief", 7).await;
        assert_eq!(offers, [Offer { offer: 4, ..nothing(5) }, nothing(6)]);
    }

    #[actix::test]
    async fn the_deque_never_hears_of_strangers_or_other_boots() {
        let addr = listen(true);
        for (thief, generation) in [("stranger", 7), ("thief", 6), ("thief", 8)] {
            assert_eq!(ask_twice(addr, thief, generation).await, [nothing(5), nothing(6)]);
        }
        assert_eq!(ask_twice(addr, "thief", 7).await[0].offer, 4, "nor does the rate limit");
    }

    #[actix::test]
    async fn a_node_that_is_not_stolen_from_offers_nothing() {
        assert_eq!(ask_twice(listen(false), "thief", 7).await, [nothing(5), nothing(6)]);
    }
}
