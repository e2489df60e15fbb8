//! `GossipSocket`: the UDP socket and the TCP listener of the gossip port.
//!
//! Owns both sockets and the sealing of datagrams. Receives datagrams and streams from the network,
//! [`Transmit`] from the prober, [`Dial`] from the prober and the membership store. Sends
//! [`Received`] to the prober, [`Asked`] to the membership store, and each hint to the actor it is
//! for. A full mailbox of theirs drops the datagram, and counts it: the network loses them too.
//! On death the node stops.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::LocalBoxFuture;
use futures_util::stream;
use meshwork_protocol::id::{JobId, NodeId};
use meshwork_protocol::limits::{DATAGRAM_BYTES_MAX, FINISHED_IDS_MAX};
use meshwork_protocol::swim::members::{DialError, Target};
use meshwork_protocol::swim::{Answer, Ask};
use meshwork_protocol::wire::datagram::{self, Body, Datagram, Sender};
use meshwork_protocol::wire::stream::{
    AnswerReader, AskReader, GossipFrame, Hello, StreamError, answer_frames, ask_frames,
};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::identity::Identity;
use crate::mesh::links::{Dialler, LinkError, accept, connect, expect_frame, write_frame};
use crate::metrics::Metrics;

/// Streams of peers that are served at once; more wait in the listener's backlog.
const STREAMS_MAX: usize = 128;

/// Time for a peer to send its whole request and take the whole answer.
const SERVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for this node to do the same at a peer, the connection included.
const EXCHANGE_TIMEOUT: Duration = SERVE_TIMEOUT;

/// Pause after the system failed to receive: an error that stays must not take the whole arbiter.
const RECEIVE_PAUSE: Duration = Duration::from_millis(10);

/// Send a message, unsealed, as one datagram.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Transmit {
    /// Where.
    pub to: SocketAddr,
    /// The encoded message.
    pub message: Vec<u8>,
}

/// A datagram of this mesh arrived.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Received {
    /// From where.
    pub from: SocketAddr,
    /// What.
    pub datagram: Datagram,
}

/// Ask a peer by stream.
#[derive(Message)]
#[rtype(result = "Result<(Sender, Answer), DialError>")]
pub struct Dial {
    /// Whom; a name is resolved each time.
    pub to: Target,
    /// What.
    pub ask: Ask,
}

/// A peer asks by stream.
#[derive(Message)]
#[rtype(result = "Option<Answer>")]
pub struct Asked {
    /// Who.
    pub from: Sender,
    /// What.
    pub ask: Ask,
}

/// A peer says that the store has jobs for this node.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Nudged;

/// A peer that was asked in vain has jobs to give now.
#[derive(Message)]
#[rtype(result = "()")]
pub struct SurplusHinted {
    /// Who.
    pub from: NodeId,
    /// How many.
    pub stealable: u32,
}

/// A peer says that jobs accepted here have ended.
#[derive(Message)]
#[rtype(result = "()")]
pub struct EndedElsewhere {
    /// Which.
    pub jobs: Vec<JobId>,
}

/// Whom the socket tells.
pub struct Peers {
    /// `SwimProber`.
    pub prober: Recipient<Received>,
    /// `MembershipStore`.
    pub members: Recipient<Asked>,
    /// `Prefetcher`.
    pub nudged: Recipient<Nudged>,
    /// `Stealer`.
    pub hinted: Recipient<SurplusHinted>,
    /// `ResultCollector`.
    pub ended: Recipient<EndedElsewhere>,
}

/// The sockets of the gossip port, bound but not yet served.
pub struct Bound {
    /// For datagrams.
    pub udp: std::net::UdpSocket,
    /// For streams, on the same port.
    pub tcp: std::net::TcpListener,
    /// The address of both.
    pub addr: SocketAddr,
}

/// Tries at a free port for both, when the caller left the choice to the system.
const BIND_TRIES: usize = 32;

/// Binds UDP and TCP on the same port.
///
/// # Errors
/// The system's, when the address is not this machine's or the port is taken.
pub fn bind(addr: SocketAddr) -> io::Result<Bound> {
    let mut tries = if addr.port() == 0 { BIND_TRIES } else { 1 };
    loop {
        tries -= 1;
        let udp = std::net::UdpSocket::bind(addr)?;
        let addr = udp.local_addr()?;
        match std::net::TcpListener::bind(addr) {
            Ok(tcp) => {
                udp.set_nonblocking(true)?;
                tcp.set_nonblocking(true)?;
                return Ok(Bound { udp, tcp, addr });
            }
            Err(_) if tries > 0 => {}
            Err(e) => return Err(e),
        }
    }
}

/// The actor.
pub struct GossipSocket {
    identity: Arc<Identity>,
    metrics: Arc<Metrics>,
    dialler: Arc<dyn Dialler>,
    udp: Arc<UdpSocket>,
    tcp: Option<TcpListener>,
    peers: Peers,
    serving: Arc<Semaphore>,
}

impl GossipSocket {
    /// Takes the sockets over; called on the arbiter that serves them.
    ///
    /// # Panics
    /// When the sockets cannot be registered with the runtime: the node cannot live then.
    pub fn new(
        identity: Arc<Identity>,
        metrics: Arc<Metrics>,
        dialler: Arc<dyn Dialler>,
        bound: Bound,
        peers: Peers,
    ) -> Self {
        let udp = UdpSocket::from_std(bound.udp).expect("the gossip socket joins the runtime");
        let tcp = TcpListener::from_std(bound.tcp).expect("the gossip listener joins the runtime");
        Self {
            identity,
            metrics,
            dialler,
            udp: Arc::new(udp),
            tcp: Some(tcp),
            peers,
            serving: Arc::new(Semaphore::new(STREAMS_MAX)),
        }
    }

    fn route(&self, from: SocketAddr, datagram: Datagram) {
        let sent = match datagram.body {
            Body::Nudge => self.peers.nudged.try_send(Nudged).is_ok(),
            Body::SurplusHint { stealable } => {
                let hint = SurplusHinted { from: datagram.from.node, stealable };
                self.peers.hinted.try_send(hint).is_ok()
            }
            Body::Finished { mut jobs } => {
                jobs.truncate(FINISHED_IDS_MAX);
                self.peers.ended.try_send(EndedElsewhere { jobs }).is_ok()
            }
            _ => self.peers.prober.try_send(Received { from, datagram }).is_ok(),
        };
        if !sent {
            self.metrics.datagrams_dropped.increment();
        }
    }
}

impl Actor for GossipSocket {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        // One byte more than allowed, so that a longer datagram is seen to be longer.
        let buffer = vec![0; DATAGRAM_BYTES_MAX + 1];
        ctx.add_stream(stream::unfold((self.udp.clone(), buffer), |(udp, mut buffer)| async {
            Some((receive(&udp, &mut buffer).await, (udp, buffer)))
        }));
        if let Some(tcp) = self.tcp.take() {
            let serving = self.serving.clone();
            ctx.add_stream(stream::unfold((tcp, serving), |(tcp, serving)| async {
                let permit = serving.clone().acquire_owned().await.ok()?;
                Some((Accepted { stream: accept(&tcp).await, permit }, (tcp, serving)))
            }));
        }
    }
}

struct Arrived {
    from: SocketAddr,
    bytes: Vec<u8>,
}

async fn receive(udp: &UdpSocket, buffer: &mut [u8]) -> Arrived {
    loop {
        match udp.recv_from(buffer).await {
            Ok((len, from)) => return Arrived { from, bytes: buffer[..len].to_vec() },
            Err(error) => {
                if is_of_a_send(&error) {
                    tracing::debug!(%error, "an earlier datagram was refused");
                } else {
                    tracing::warn!(%error, "no datagram can be received");
                }
                sleep(RECEIVE_PAUSE).await;
            }
        }
    }
}

/// Some systems report the refusal of an earlier send where one receives; the socket goes on.
fn is_of_a_send(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

impl StreamHandler<Arrived> for GossipSocket {
    fn handle(&mut self, Arrived { from, bytes }: Arrived, _: &mut Self::Context) {
        match datagram::open(self.identity.mesh, &bytes) {
            Ok(datagram) => {
                self.metrics.datagrams_received.increment();
                self.route(from, datagram);
            }
            Err(error) => {
                self.metrics.datagrams_refused.increment();
                tracing::debug!(%from, %error, "datagram dropped");
            }
        }
    }
}

impl Handler<Transmit> for GossipSocket {
    type Result = ();

    fn handle(&mut self, Transmit { to, message }: Transmit, _: &mut Self::Context) {
        let bytes = datagram::seal(self.identity.mesh, &message);
        match self.udp.try_send_to(&bytes, to) {
            Ok(_) => {
                self.metrics.datagrams_sent.increment();
                self.metrics.datagram_bytes_max.raise(bytes.len());
            }
            Err(error) => {
                self.metrics.datagrams_dropped.increment();
                tracing::debug!(%to, %error, "datagram not sent");
            }
        }
    }
}

impl Handler<Dial> for GossipSocket {
    type Result = LocalBoxFuture<'static, Result<(Sender, Answer), DialError>>;

    fn handle(&mut self, Dial { to, ask }: Dial, _: &mut Self::Context) -> Self::Result {
        let identity = self.identity.clone();
        let dialler = self.dialler.clone();
        Box::pin(async move {
            let addr = resolve(&to).await?;
            let exchange = exchange(&identity, dialler.as_ref(), addr, &ask);
            match timeout(EXCHANGE_TIMEOUT, exchange).await {
                Ok(result) => result.map_err(|error| dial_error(addr, error)),
                Err(_) => Err(DialError::TimedOut),
            }
        })
    }
}

async fn resolve(to: &Target) -> Result<SocketAddr, DialError> {
    match to {
        Target::Addr(addr) => Ok(*addr),
        Target::Seed(name) => {
            let lookup = timeout(SERVE_TIMEOUT, tokio::net::lookup_host(name.as_str())).await;
            let mut found = lookup
                .map_err(|_| DialError::Unresolved(format!("no answer in {SERVE_TIMEOUT:?}")))?
                .map_err(|e| DialError::Unresolved(e.to_string()))?;
            found.next().ok_or_else(|| DialError::Unresolved("it has no address".into()))
        }
    }
}

fn dial_error(addr: SocketAddr, error: LinkError) -> DialError {
    match error {
        LinkError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => DialError::Closed,
        LinkError::Io(e) => DialError::Unreachable(format!("{addr}: {e}")),
        LinkError::ConnectTimeout => DialError::Unreachable(format!("{addr}: {error}")),
        LinkError::ResponseTimeout | LinkError::WriteTimeout => DialError::TimedOut,
        LinkError::Stream(error) => error.into(),
    }
}

async fn exchange(
    identity: &Identity,
    dialler: &dyn Dialler,
    to: SocketAddr,
    ask: &Ask,
) -> Result<(Sender, Answer), LinkError> {
    let mut stream = connect(dialler, to).await?;
    write_frame(&mut stream, &Hello::new(identity.mesh, identity.sender())).await?;
    for frame in ask_frames(ask) {
        write_frame(&mut stream, &frame).await?;
    }
    let hello: Hello = expect_frame(&mut stream).await?;
    let from = hello.accept(identity.mesh)?;
    let mut reader = AnswerReader::default();
    loop {
        let frame: GossipFrame = expect_frame(&mut stream).await?;
        if let Some(answer) = reader.frame(frame)? {
            return Ok((from, answer));
        }
    }
}

struct Accepted {
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
}

impl StreamHandler<Accepted> for GossipSocket {
    fn handle(&mut self, Accepted { stream, permit }: Accepted, _: &mut Self::Context) {
        let identity = self.identity.clone();
        let metrics = self.metrics.clone();
        let members = self.peers.members.clone();
        actix::spawn(async move {
            let served = timeout(SERVE_TIMEOUT, serve(stream, &identity, &members)).await;
            let refusal = match served {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("it was not served within {SERVE_TIMEOUT:?}")),
            };
            if let Some(error) = refusal {
                metrics.streams_refused.increment();
                tracing::debug!(%error, "a gossip stream was closed");
            }
            drop(permit);
        });
    }
}

async fn serve(
    mut stream: TcpStream,
    identity: &Identity,
    members: &Recipient<Asked>,
) -> Result<(), LinkError> {
    stream.set_nodelay(true)?;
    let hello: Hello = expect_frame(&mut stream).await?;
    let from = match hello.accept(identity.mesh) {
        Ok(from) => from,
        Err(refused) => {
            // Whoever speaks meshwork is told who is here: two meshes may share a store, in which
            // names are unique.
            if refused == StreamError::OtherMesh {
                write_frame(&mut stream, &Hello::new(identity.mesh, identity.sender())).await?;
            }
            return Err(refused.into());
        }
    };
    let mut reader = AskReader::default();
    let ask = loop {
        if let Some(ask) = reader.frame(expect_frame(&mut stream).await?)? {
            break ask;
        }
    };
    let answer = match ask {
        Ask::Ping => Some(Answer::Pong),
        // A closed mailbox means that the node is stopping: closing the stream says so.
        ask => members.send(Asked { from, ask }).await.unwrap_or(None),
    };
    let Some(answer) = answer else { return Ok(()) };
    write_frame(&mut stream, &Hello::new(identity.mesh, identity.sender())).await?;
    for frame in answer_frames(&answer) {
        write_frame(&mut stream, &frame).await?;
    }
    Ok(())
}
