//! Emulated links between regions: what is sent arrives later.
//!
//! Latency lives here, outside of what a node is made of. A datagram waits in [`LinkEmulator`]
//! before the socket sends it. A stream runs through [`delay_line`]s, one each way, and costs a
//! round trip to open. The order within a stream is kept, and what is under way is bounded.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use actix::prelude::*;
use meshwork::{Dialler, Dialling, Links, Stream, TcpDialler, Transmit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

/// Datagrams under way from one node; more are lost, as they are on a full link.
const DATAGRAMS_MAX: usize = 4_096;
/// Largest piece of a stream that travels as one.
const CHUNK_BYTES: usize = 16 << 10;
/// Pieces of a stream under way in one direction: a megabyte of them at most.
const CHUNKS_MAX: usize = 64;

/// How far each address is, one way. Shared by a node's links; filled when its peers are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkTable(Arc<RwLock<HashMap<SocketAddr, Duration>>>);

impl LinkTable {
    /// What is sent to `to` takes this long from now on.
    pub(crate) fn set(&self, to: SocketAddr, one_way: Duration) {
        self.0.write().expect("no writer panics").insert(to, one_way);
    }

    /// How long what is sent to `to` takes; nothing for an address that is not known.
    fn one_way(&self, to: SocketAddr) -> Duration {
        self.0.read().expect("no writer panics").get(&to).copied().unwrap_or_default()
    }
}

impl Links for LinkTable {
    fn datagrams(&self, socket: Recipient<Transmit>) -> Recipient<Transmit> {
        LinkEmulator { table: self.clone(), socket, under_way: 0 }.start().recipient()
    }

    fn dialler(&self) -> Arc<dyn Dialler> {
        Arc::new(DelayedDialler { table: self.clone() })
    }
}

/// Passes datagrams on to the socket when they have travelled long enough.
///
/// Owns those under way. Receives [`Transmit`] from the prober, on the control arbiter; sends it on to
/// `GossipSocket`. On death nothing is sent any more, and the node looks dead to the others.
struct LinkEmulator {
    table: LinkTable,
    socket: Recipient<Transmit>,
    under_way: usize,
}

impl Actor for LinkEmulator {
    type Context = Context<Self>;
}

impl Handler<Transmit> for LinkEmulator {
    type Result = ();

    fn handle(&mut self, transmit: Transmit, ctx: &mut Self::Context) {
        let one_way = self.table.one_way(transmit.to);
        if one_way.is_zero() {
            self.socket.do_send(transmit);
        } else if self.under_way < DATAGRAMS_MAX {
            self.under_way += 1;
            ctx.run_later(one_way, |emulator, _| {
                emulator.under_way -= 1;
                emulator.socket.do_send(transmit);
            });
        }
    }
}

struct DelayedDialler {
    table: LinkTable,
}

impl Dialler for DelayedDialler {
    fn dial(&self, to: SocketAddr) -> Dialling {
        let one_way = self.table.one_way(to);
        Box::pin(async move {
            sleep(2 * one_way).await;
            let stream = TcpDialler.dial(to).await?;
            if one_way.is_zero() {
                return Ok(stream);
            }
            Ok(Box::new(delay_stream(stream, one_way)) as Box<dyn Stream>)
        })
    }
}

/// The near end of a stream whose far end is `one_way` away. Needs a local task set.
fn delay_stream<S>(stream: S, one_way: Duration) -> DuplexStream
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let (near, inner) = tokio::io::duplex(CHUNK_BYTES);
    let (inner_read, inner_write) = tokio::io::split(inner);
    let (far_read, far_write) = tokio::io::split(stream);
    tokio::task::spawn_local(delay_line(inner_read, far_write, one_way));
    tokio::task::spawn_local(delay_line(far_read, inner_write, one_way));
    near
}

/// Carries bytes from `from` to `to`, each `one_way` after it was read, and then the end; an error
/// of either ends the line.
async fn delay_line<R, W>(mut from: R, mut to: W, one_way: Duration)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS_MAX);
    let take_in = async move {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let len = from.read(&mut chunk).await.unwrap_or(0);
            let piece = (Instant::now() + one_way, chunk[..len].to_vec());
            if sender.send(piece).await.is_err() || len == 0 {
                return;
            }
        }
    };
    let put_out = async move {
        while let Some((due, piece)) = receiver.recv().await {
            sleep_until(due).await;
            // The end of the stream is an empty piece.
            if piece.is_empty() || to.write_all(&piece).await.is_err() {
                break;
            }
        }
        // The peer that is told of the end may be gone already.
        let _ = to.shutdown().await;
    };
    // Once nothing can be put out, there is nothing to take in for.
    tokio::select! {
        () = put_out => {}
        () = async { take_in.await; std::future::pending().await } => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    const ONE_WAY: Duration = Duration::from_millis(100);

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    async fn read_text<R: AsyncRead + Unpin>(reader: &mut R, len: usize) -> String {
        let mut bytes = vec![0; len];
        reader.read_exact(&mut bytes).await.unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn each_direction_takes_its_time_and_keeps_its_order() {
        let test = async {
            let (far, link) = tokio::io::duplex(1 << 10);
            let mut near = delay_stream(link, ONE_WAY);
            let (mut far_read, mut far_write) = tokio::io::split(far);
            let begun = Instant::now();
            near.write_all(b"one").await.unwrap();
            sleep(Duration::from_millis(30)).await;
            near.write_all(b"two").await.unwrap();
            assert_eq!(read_text(&mut far_read, 3).await, "one");
            assert_eq!(begun.elapsed(), ONE_WAY);
            assert_eq!(read_text(&mut far_read, 3).await, "two");
            assert_eq!(begun.elapsed(), ONE_WAY + Duration::from_millis(30));
            let answered = Instant::now();
            far_write.write_all(b"back").await.unwrap();
            assert_eq!(read_text(&mut near, 4).await, "back");
            assert_eq!(answered.elapsed(), ONE_WAY);
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_stream_travels_too() {
        let test = async {
            let (mut far, link) = tokio::io::duplex(1 << 10);
            let mut near = delay_stream(link, ONE_WAY);
            let begun = Instant::now();
            near.write_all(b"last").await.unwrap();
            drop(near);
            let mut all = String::new();
            far.read_to_string(&mut all).await.unwrap();
            assert_eq!((all.as_str(), begun.elapsed()), ("last", ONE_WAY));
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_reads_is_bounded() {
        let test = async {
            let (_far, link) = tokio::io::duplex(1 << 10);
            let mut near = delay_stream(link, ONE_WAY);
            let mut taken = 0;
            let flood = async {
                loop {
                    taken += near.write(&[0; 1 << 10]).await.unwrap();
                }
            };
            tokio::time::timeout(Duration::from_secs(60), flood).await.unwrap_err();
            assert!(taken >= CHUNK_BYTES, "{taken} bytes");
            assert!(taken <= (CHUNKS_MAX + 4) * CHUNK_BYTES, "{taken} bytes");
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_costs_a_round_trip() {
        let test = async {
            let listener = tokio::net::TcpListener::bind(addr(0)).await.unwrap();
            let to = listener.local_addr().unwrap();
            let table = LinkTable::default();
            table.set(to, ONE_WAY);
            let begun = Instant::now();
            table.dialler().dial(to).await.unwrap();
            assert_eq!(begun.elapsed(), 2 * ONE_WAY);
        };
        LocalSet::new().run_until(test).await;
    }

    /// A socket that keeps what it is given, and when.
    #[derive(Default)]
    struct Kept(Vec<(Instant, Vec<u8>)>);

    impl Actor for Kept {
        type Context = Context<Self>;
    }

    impl Handler<Transmit> for Kept {
        type Result = ();

        fn handle(&mut self, transmit: Transmit, _: &mut Self::Context) {
            self.0.push((Instant::now(), transmit.message));
        }
    }

    #[derive(Message)]
    #[rtype(result = "Vec<(Instant, Vec<u8>)>")]
    struct Take;

    impl Handler<Take> for Kept {
        type Result = MessageResult<Take>;

        fn handle(&mut self, _: Take, _: &mut Self::Context) -> Self::Result {
            MessageResult(std::mem::take(&mut self.0))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn datagrams_wait_as_long_as_their_link_is() {
        let test = async {
            let table = LinkTable::default();
            table.set(addr(1), ONE_WAY);
            table.set(addr(2), ONE_WAY / 2);
            let kept = Kept::default().start();
            let link = table.datagrams(kept.clone().recipient());
            let begun = Instant::now();
            for port in 1..=3 {
                link.do_send(Transmit { to: addr(port), message: vec![port as u8] });
            }
            sleep(2 * ONE_WAY).await;
            let kept = kept.send(Take).await.unwrap();
            let arrivals: Vec<_> = kept.iter().map(|(at, m)| (m[0], *at - begun)).collect();
            assert_eq!(arrivals, [(3, Duration::ZERO), (2, ONE_WAY / 2), (1, ONE_WAY)]);
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_link_loses_datagrams() {
        let test = async {
            let table = LinkTable::default();
            table.set(addr(1), ONE_WAY);
            let kept = Kept::default().start();
            let link = table.datagrams(kept.clone().recipient());
            for _ in 0..DATAGRAMS_MAX + 10 {
                link.do_send(Transmit { to: addr(1), message: vec![] });
            }
            sleep(2 * ONE_WAY).await;
            assert_eq!(kept.send(Take).await.unwrap().len(), DATAGRAMS_MAX);
        };
        LocalSet::new().run_until(test).await;
    }
}
