//! What a node does with bytes that are not its mesh's: counts them, drops them, lives on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use futures_util::StreamExt;
use meshwork::prelude::*;
use meshwork::protocol::id::{Generation, NodeId};
use meshwork::protocol::limits::FRAME_BYTES_MAX;
use meshwork::protocol::wire::datagram::{Body, MeshId, Sender, Writer, seal};
use meshwork::protocol::wire::stream::{GossipFrame, Hello, StealFrame, encode_frame};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Echo(u32);

impl Job for Echo {
    const NAME: &'static str = "echo";
    type Output = u32;
}

async fn echo(Echo(n): Echo) -> Result<u32, JobError> {
    Ok(n)
}

async fn node(id: &str) -> Mesh {
    Mesh::builder(id).protocol_period(Duration::from_millis(100)).job(echo).start().await.unwrap()
}

async fn still_works(mesh: &Mesh) {
    let ticket = mesh.enqueue(Enqueue::new(&Echo(7))).await.unwrap();
    assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(7));
}

/// Waits, a bounded time, until `count` is what it should be: the network has its own pace.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1_000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not in 10 s");
}

fn stranger() -> Sender {
    Sender { node: NodeId::new("stranger").unwrap(), generation: Generation(1) }
}

/// A ping of the mesh called `mesh`.
fn ping(mesh: &str) -> Vec<u8> {
    let body = Body::Ping { seq: 1, to: NodeId::new("a").unwrap() };
    seal(MeshId::of(mesh), &Writer::new(stranger(), body).finish())
}

#[actix::test]
async fn datagrams_that_are_not_its_meshs_are_counted_and_dropped() {
    let mesh = node("a").await;
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let good = ping("meshwork");
    let mut rubbish = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        ping("another mesh"),
        vec![0x6d; 60_000],
    ];
    rubbish.extend((1..good.len()).map(|len| good[..len].to_vec()));
    rubbish.extend((0..16).map(|bit| {
        // The magic is in the first two bytes.
        let mut bent = good.clone();
        bent[bit / 8] ^= 1 << (bit % 8);
        bent
    }));
    rubbish.extend((0..100).map(|_| (0..random.usize(0..1_400)).map(|_| random.u8(..)).collect()));
    let mut sent = 0;
    // In small parts: what overflows the socket's buffer is never seen by the node.
    for part in rubbish.chunks(16) {
        for bytes in part {
            socket.send_to(bytes, mesh.gossip_addr()).unwrap();
            sent += 1;
        }
        until("every one is counted", || mesh.metrics().datagrams_refused == sent).await;
    }
    assert_eq!(mesh.members().members.len(), 1, "nobody joined by this");
    still_works(&mesh).await;
    mesh.drain(Duration::from_secs(5)).await;
}

/// Sends bytes to a port and waits until the node hangs up.
fn send_and_be_cut_off(to: SocketAddr, bytes: &[u8]) {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // The node may hang up before all is written, and then reading fails too.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
}

#[actix::test]
async fn frames_that_are_not_its_meshs_end_their_stream_and_nothing_else() {
    let mesh = node("a").await;
    let hello = |name: &str| encode_frame(&Hello::new(MeshId::of(name), stranger())).unwrap();
    let greeting = hello("meshwork");
    let too_long = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_be_bytes();
    let after = |frame: &[u8]| [&greeting, frame].concat();
    let mut cases = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        too_long.to_vec(),
        u32::MAX.to_be_bytes().to_vec(),
        // Announced and never sent.
        vec![0, 1, 0, 0],
        hello("another mesh"),
        after(&too_long),
        after(&[0, 0, 0, 3, 0xff, 0xff, 0xff]),
        after(&encode_frame(&GossipFrame::Pong).unwrap()),
    ];
    cases.extend((1..greeting.len()).map(|len| greeting[..len].to_vec()));
    let (gossip, steal) = (mesh.gossip_addr(), mesh.steal_addr());
    let count = cases.len() as u64;
    let sending = tokio::task::spawn_blocking(move || {
        for case in cases {
            send_and_be_cut_off(gossip, &case);
            send_and_be_cut_off(steal, &case);
        }
    });
    sending.await.unwrap();
    // A Pong is a refused frame at the gossip port, and no frame at all at the steal port.
    until("every one is counted", || mesh.metrics().streams_refused >= 2 * count - 1).await;
    still_works(&mesh).await;
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_thief_that_is_no_member_gets_nothing() {
    let mesh = node("a").await;
    let steal = mesh.steal_addr();
    let load = meshwork::Load { slots: 64, ..meshwork::Load::default() };
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(steal).unwrap();
        let hello = Hello::new(MeshId::of("meshwork"), stranger());
        stream.write_all(&encode_frame(&hello).unwrap()).unwrap();
        let request = StealFrame::Request { seq: 9, max: 16, load };
        stream.write_all(&encode_frame(&request).unwrap()).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut payload = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut payload).unwrap();
        meshwork::protocol::wire::stream::decode_frame::<StealFrame>(&payload).unwrap()
    });
    let StealFrame::Offer(offer) = answer.await.unwrap() else { panic!("an answer is an offer") };
    assert_eq!((offer.seq, offer.jobs.len()), (9, 0));
    mesh.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_flood_of_rubbish_makes_no_healthy_node_look_dead() {
    let first = node("a").await;
    let second = Mesh::builder("b")
        .protocol_period(Duration::from_millis(100))
        .seed(first.gossip_addr().to_string())
        .job(echo)
        .start()
        .await
        .unwrap();
    let mut events = second.events();
    let target = first.gossip_addr();
    let flood = tokio::task::spawn_blocking(move || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let rubbish = [0x6d; 600];
        for _ in 0..50_000 {
            // A full buffer on loopback refuses: that is the flood's problem.
            let _ = socket.send_to(&rubbish, target);
        }
    });
    flood.await.unwrap();
    still_works(&first).await;
    // Some periods more, for a verdict that the flood may have caused.
    tokio::time::sleep(Duration::from_secs(1)).await;
    while let Ok(Some(event)) = tokio::time::timeout(Duration::ZERO, events.next()).await {
        assert!(!matches!(event, MembershipEvent::Died { .. }), "{event:?}");
    }
    assert_eq!(second.members().present().count(), 2);
    second.drain(Duration::from_secs(5)).await;
    first.drain(Duration::from_secs(5)).await;
}
