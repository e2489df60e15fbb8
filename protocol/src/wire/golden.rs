//! The exact bytes of every message and variant. A change here is a change of the wire: nodes of the
//! versions before and after cannot talk, and [`VERSION`](super::datagram::VERSION) must grow.

use std::fmt::{Debug, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::codec::{decode, encode, encoded_len};
use super::datagram::{Body, Datagram, MeshId, Sender, Writer, open, seal};
use super::stream::{GossipFrame, Hello, Offer, OfferedJob, StealFrame, encode_frame};
use crate::id::{FencingToken, Generation, HandlerName, Incarnation, JobId, NodeId, Tenant};
use crate::job::{Claim, ClaimedJob, JobSpec};
use crate::limits::FRAME_DECODE_BYTES_MAX;
use crate::load::{Load, LoadReport};
use crate::swim::{Member, MemberState};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes every text");
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

/// `message` has these bytes, and these bytes are `message`. Blanks in `bytes` part its fields.
#[track_caller]
fn golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: T, bytes: &str) {
    let bytes = bytes.replace(' ', "");
    assert_eq!(hex(&encode(&message)), bytes, "{message:?}");
    assert_eq!(encoded_len(&message), bytes.len() / 2);
    assert_eq!(decode::<T, FRAME_DECODE_BYTES_MAX>(&unhex(&bytes)), Ok(message));
}

fn node(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

fn sender() -> Sender {
    Sender { node: node("ab"), generation: Generation(3) }
}

fn v4() -> SocketAddr {
    "127.0.0.1:7946".parse().unwrap()
}

fn v6() -> SocketAddr {
    "[2001:db8::1]:80".parse().unwrap()
}

fn member(state: MemberState) -> Member {
    Member {
        id: node("c"),
        generation: Generation(2),
        incarnation: Incarnation(1),
        state,
        gossip: v4(),
        steal: v6(),
    }
}

fn load() -> LoadReport {
    let load =
        Load { version: 9, stealable: 1, queued: 2, running: 3, slots: 4, service_us: 20_000 };
    LoadReport { node: node("ab"), generation: Generation(3), load, age_ms: 5 }
}

fn job_id() -> JobId {
    JobId::from_bytes(*b"0123456789abcdef")
}

fn claim() -> Claim {
    Claim { job: job_id(), token: FencingToken(6) }
}

fn job(key: Option<&str>) -> ClaimedJob {
    let spec = JobSpec {
        id: job_id(),
        handler: HandlerName::new("h").unwrap(),
        arguments: Arc::from("{}"),
        key: key.map(Arc::from),
        tenant: Tenant::new("t").unwrap(),
        priority: -2,
        run_at_ms: 0,
        max_attempts: 5,
        pinned: false,
        origin: node("o"),
        enqueued_ms: 1_700_000_000_000,
    };
    ClaimedJob { spec: Arc::new(spec), token: FencingToken(6), attempt: 1 }
}

#[test]
fn integers_take_one_byte_up_to_250_and_then_a_mark_and_their_width() {
    golden(Generation(0), "00");
    golden(Generation(250), "fa");
    golden(Generation(251), "fbfb00");
    golden(Generation(0xffff), "fbffff");
    golden(Generation(0x1_0000), "fc00000100");
    golden(Generation(u64::from(u32::MAX) + 1), "fd0000000001000000");
    golden(Generation(u64::MAX), "fdffffffffffffffff");
    golden(Incarnation(u32::MAX), "fcffffffff");
}

#[test]
fn every_body_of_a_datagram() {
    let bodies = [
        (Body::Ping { seq: 7, to: node("b") }, "00070162"),
        (Body::Ack { seq: 7 }, "0107"),
        (Body::Nack { seq: 300 }, "02fb2c01"),
        (Body::PingReq { seq: 7, target: node("b"), addr: v4() }, "03070162007f000001fb0a1f"),
        (Body::AckRelay { seq: 7, target: sender() }, "040702616203"),
        (Body::Leave, "05"),
        (Body::Nudge, "06"),
        (Body::SurplusHint { stealable: 12 }, "070c"),
        (Body::Finished { jobs: vec![job_id()] }, "0801 30313233343536373839616263646566"),
    ];
    for (number, (body, bytes)) in bodies.into_iter().enumerate() {
        // A new variant does not compile here until it has its bytes above.
        let place = match body {
            Body::Ping { .. } => 0,
            Body::Ack { .. } => 1,
            Body::Nack { .. } => 2,
            Body::PingReq { .. } => 3,
            Body::AckRelay { .. } => 4,
            Body::Leave => 5,
            Body::Nudge => 6,
            Body::SurplusHint { .. } => 7,
            Body::Finished { .. } => 8,
        };
        assert_eq!(place, number);
        golden(body, bytes);
    }
}

#[test]
fn members_in_every_state() {
    golden(
        member(MemberState::Alive),
        "0163 02 01 00 007f000001fb0a1f 0120010db800000000000000000000000150",
    );
    golden(
        member(MemberState::Suspect),
        "0163 02 01 01 007f000001fb0a1f 0120010db800000000000000000000000150",
    );
    golden(
        member(MemberState::Dead),
        "0163 02 01 02 007f000001fb0a1f 0120010db800000000000000000000000150",
    );
    golden(
        member(MemberState::Left),
        "0163 02 01 03 007f000001fb0a1f 0120010db800000000000000000000000150",
    );
}

#[test]
fn the_load_report() {
    golden(load(), "026162 03 09 01 02 03 04 fb204e 05");
}

#[test]
fn whole_datagrams_and_their_header() {
    let ping = Body::Ping { seq: 7, to: node("b") };
    let mut writer = Writer::new(sender(), ping.clone());
    assert!(writer.update(&member(MemberState::Suspect)));
    assert!(writer.load(&load()));
    let datagram = Datagram {
        from: sender(),
        body: ping,
        updates: vec![member(MemberState::Suspect)],
        loads: vec![load()],
    };
    let message = writer.finish();
    golden(
        datagram.clone(),
        "026162 03 00070162 01 0163 02 01 01 007f000001fb0a1f 0120010db800000000000000000000000150 \
         01 026162 03 09 01 02 03 04 fb204e 05",
    );
    assert_eq!(message, encode(&datagram));

    assert_eq!(MeshId::of("meshwork"), MeshId(0xbbc8_baa1));
    let sealed = seal(MeshId(0x0a0b_0c0d), &message);
    assert_eq!(hex(&sealed[..8]), "6d7701000a0b0c0d");
    assert_eq!(sealed[8..], message);
    assert_eq!(open(MeshId(0x0a0b_0c0d), &sealed), Ok(datagram));
}

#[test]
fn the_greeting_and_the_frame_around_it() {
    let hello = Hello::new(MeshId(1), sender());
    golden(hello.clone(), "fb776d 01 01 026162 03");
    assert_eq!(hex(&encode_frame(&hello).unwrap()), "00000009fb776d010102616203");
}

#[test]
fn every_frame_of_the_gossip_port() {
    let alive = || member(MemberState::Alive);
    let frames = [
        (
            GossipFrame::Join(alive()),
            "00 0163 02 01 00 007f000001fb0a1f 0120010db800000000000000000000000150",
        ),
        (GossipFrame::Sync, "01"),
        (
            GossipFrame::Chunk { members: vec![alive()], last: true },
            "02 01 0163 02 01 00 007f000001fb0a1f 0120010db800000000000000000000000150 01",
        ),
        (GossipFrame::End { highest: Some(Generation(4)) }, "030104"),
        (GossipFrame::Refused { holder: v4() }, "04007f000001fb0a1f"),
        (GossipFrame::Ping, "05"),
        (GossipFrame::Pong, "06"),
    ];
    for (number, (frame, bytes)) in frames.into_iter().enumerate() {
        let place = match frame {
            GossipFrame::Join(_) => 0,
            GossipFrame::Sync => 1,
            GossipFrame::Chunk { .. } => 2,
            GossipFrame::End { .. } => 3,
            GossipFrame::Refused { .. } => 4,
            GossipFrame::Ping => 5,
            GossipFrame::Pong => 6,
        };
        assert_eq!(place, number);
        golden(frame, bytes);
    }
    golden(GossipFrame::Chunk { members: vec![], last: false }, "020000");
    golden(GossipFrame::End { highest: None }, "0300");
}

#[test]
fn every_frame_of_the_steal_port() {
    let empty = Offer { seq: 1, offer: 0, expires_ms: 5_000, jobs: vec![], load: None };
    let offer = Offer {
        offer: 2,
        jobs: vec![OfferedJob::Whole(job(Some("k"))), OfferedJob::Named(claim())],
        load: Some(load()),
        ..empty.clone()
    };
    let frames = [
        (
            StealFrame::Request {
                seq: 1,
                max: 16,
                load: Load {
                    version: 1,
                    stealable: 2,
                    queued: 3,
                    running: 4,
                    slots: 5,
                    service_us: 6,
                },
            },
            "000110010203040506",
        ),
        (
            StealFrame::Offer(offer),
            "01 01 02 fb8813 02 00 30313233343536373839616263646566 0168 027b7d 01016b 0174 \
             03 00 05 00 016f fd0068e5cf8b010000 06 01 \
             01 30313233343536373839616263646566 06 \
             01 026162 03 09 01 02 03 04 fb204e 05",
        ),
        (
            StealFrame::Settle { offer: 2, taken: vec![job_id()] },
            "020201 30313233343536373839616263646566",
        ),
    ];
    for (number, (frame, bytes)) in frames.into_iter().enumerate() {
        let place = match frame {
            StealFrame::Request { .. } => 0,
            StealFrame::Offer(_) => 1,
            StealFrame::Settle { .. } => 2,
        };
        assert_eq!(place, number);
        golden(frame, bytes);
    }
    golden(StealFrame::Offer(empty), "010100fb88130000");
    golden(
        OfferedJob::Whole(job(None)),
        "00 30313233343536373839616263646566 0168 027b7d 00 0174 \
             03 00 05 00 016f fd0068e5cf8b010000 06 01",
    );
    golden(OfferedJob::Named(claim()), "01 30313233343536373839616263646566 06");
}
