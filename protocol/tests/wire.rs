//! Properties of the wire: what is sent is what is read, and nothing that is read does harm.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::Arc;

use meshwork_protocol::id::{
    FencingToken, Generation, HandlerName, Incarnation, JobId, NodeId, Tenant,
};
use meshwork_protocol::job::{Claim, ClaimedJob, JobSpec};
use meshwork_protocol::limits::{
    DATAGRAM_BODY_BYTES_MAX, DATAGRAM_BYTES_MAX, DATAGRAM_DECODE_BYTES_MAX, DATAGRAM_ITEMS_MAX,
    FINISHED_IDS_MAX, FRAME_BYTES_MAX, INLINE_ARGUMENT_BYTES_MAX, KEY_BYTES_MAX, MEMBER_BYTES_MAX,
    MEMBERS_MAX, NAME_BYTES_MAX, STATE_CHUNK_MEMBERS_MAX, STEAL_BATCH_MAX,
};
use meshwork_protocol::load::{Load, LoadReport};
use meshwork_protocol::swim::{Answer, Ask, Member, MemberState};
use meshwork_protocol::wire::codec::{self, DecodeError};
use meshwork_protocol::wire::datagram::{
    Body, Datagram, DatagramError, MeshId, Sender, Writer, open, seal,
};
use meshwork_protocol::wire::stream::{
    AnswerReader, AskReader, FRAME_HEADER_BYTES, GossipFrame, Hello, Offer, OfferedJob, StealFrame,
    StreamError, answer_frames, ask_frames, decode_frame, encode_frame, frame_len,
};
use proptest::prelude::*;

const MESH: MeshId = MeshId(7);

fn node_id() -> impl Strategy<Value = NodeId> {
    prop_oneof!["[!-~]{1,64}", "[äöüß]{1,32}"]
        .prop_map(|text| NodeId::new(text).expect("visible text"))
}

/// Numbers of every encoded width.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..251_u64,
        any::<u16>().prop_map_into(),
        any::<u32>().prop_map_into(),
        any::<u64>()
    ]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![0..251_u32, any::<u16>().prop_map_into(), any::<u32>()]
}

fn addr() -> impl Strategy<Value = SocketAddr> {
    let v4 = any::<[u8; 4]>().prop_map(|ip| IpAddr::V4(Ipv4Addr::from(ip)));
    let v6 = any::<[u8; 16]>().prop_map(|ip| IpAddr::V6(Ipv6Addr::from(ip)));
    (prop_oneof![v4, v6], any::<u16>()).prop_map_into()
}

fn sender() -> impl Strategy<Value = Sender> {
    (node_id(), number())
        .prop_map(|(node, generation)| Sender { node, generation: Generation(generation) })
}

fn member() -> impl Strategy<Value = Member> {
    let state = prop::sample::select(vec![
        MemberState::Alive,
        MemberState::Suspect,
        MemberState::Dead,
        MemberState::Left,
    ]);
    (node_id(), number(), small(), state, addr(), addr()).prop_map(
        |(id, generation, incarnation, state, gossip, steal)| Member {
            id,
            generation: Generation(generation),
            incarnation: Incarnation(incarnation),
            state,
            gossip,
            steal,
        },
    )
}

fn load_report() -> impl Strategy<Value = LoadReport> {
    (sender(), number(), prop::array::uniform6(small())).prop_map(|(from, version, n)| LoadReport {
        node: from.node,
        generation: from.generation,
        load: Load {
            version,
            stealable: n[0],
            queued: n[1],
            running: n[2],
            slots: n[3],
            service_us: n[4],
        },
        age_ms: n[5],
    })
}

fn job_id() -> impl Strategy<Value = JobId> {
    any::<[u8; 16]>().prop_map(JobId::from_bytes)
}

fn claim() -> impl Strategy<Value = Claim> {
    (job_id(), number()).prop_map(|(job, token)| Claim { job, token: FencingToken(token) })
}

fn body() -> impl Strategy<Value = Body> {
    prop_oneof![
        (small(), node_id()).prop_map(|(seq, to)| Body::Ping { seq, to }),
        small().prop_map(|seq| Body::Ack { seq }),
        small().prop_map(|seq| Body::Nack { seq }),
        (small(), node_id(), addr()).prop_map(|(seq, target, addr)| Body::PingReq {
            seq,
            target,
            addr
        }),
        (small(), sender()).prop_map(|(seq, target)| Body::AckRelay { seq, target }),
        Just(Body::Leave),
        Just(Body::Nudge),
        small().prop_map(|stealable| Body::SurplusHint { stealable }),
        prop::collection::vec(job_id(), 0..=FINISHED_IDS_MAX)
            .prop_map(|jobs| Body::Finished { jobs }),
    ]
}

fn datagram() -> impl Strategy<Value = Datagram> {
    let updates = prop::collection::vec(member(), 0..8);
    let loads = prop::collection::vec(load_report(), 0..4);
    (sender(), body(), updates, loads).prop_map(|(from, body, updates, loads)| {
        let mut writer = Writer::new(from.clone(), body.clone());
        let updates = updates.into_iter().filter(|member| writer.update(member)).collect();
        let loads = loads.into_iter().filter(|report| writer.load(report)).collect();
        Datagram { from, body, updates, loads }
    })
}

fn gossip_frame() -> impl Strategy<Value = GossipFrame> {
    prop_oneof![
        member().prop_map(GossipFrame::Join),
        Just(GossipFrame::Sync),
        (prop::collection::vec(member(), 0..20), any::<bool>())
            .prop_map(|(members, last)| GossipFrame::Chunk { members, last }),
        prop::option::of(number())
            .prop_map(|highest| GossipFrame::End { highest: highest.map(Generation) }),
        addr().prop_map(|holder| GossipFrame::Refused { holder }),
        Just(GossipFrame::Ping),
        Just(GossipFrame::Pong),
    ]
}

fn claimed_job() -> impl Strategy<Value = ClaimedJob> {
    let texts = (".{0,200}", prop::option::of(".{0,64}"), any::<bool>());
    let numbers = (any::<i16>(), number(), small(), number());
    (claim(), node_id(), texts, numbers, small()).prop_map(
        |(claim, origin, (arguments, key, pinned), (priority, run_at_ms, tries, ms), attempt)| {
            let spec = JobSpec {
                id: claim.job,
                handler: HandlerName::new("resize").expect("a name"),
                arguments: Arc::from(arguments),
                key: key.map(Arc::from),
                tenant: Tenant::default_tenant(),
                priority,
                run_at_ms,
                max_attempts: tries,
                pinned,
                origin,
                enqueued_ms: ms,
            };
            ClaimedJob { spec: Arc::new(spec), token: claim.token, attempt }
        },
    )
}

fn steal_frame() -> impl Strategy<Value = StealFrame> {
    let offered =
        prop_oneof![claimed_job().prop_map(OfferedJob::Whole), claim().prop_map(OfferedJob::Named)];
    let jobs = prop::collection::vec(offered, 0..8);
    let load = prop::option::of(load_report());
    prop_oneof![
        (small(), small(), load_report()).prop_map(|(seq, max, report)| StealFrame::Request {
            seq,
            max,
            load: report.load
        }),
        (small(), number(), small(), jobs, load).prop_map(
            |(seq, offer, expires_ms, jobs, load)| {
                StealFrame::Offer(Offer { seq, offer, expires_ms, jobs, load })
            }
        ),
        (number(), prop::collection::vec(job_id(), 0..40))
            .prop_map(|(offer, taken)| StealFrame::Settle { offer, taken }),
    ]
}

fn widest_name(i: usize) -> NodeId {
    NodeId::new(format!("{i:0>NAME_BYTES_MAX$}")).expect("as long as a name may be")
}

fn widest_member(i: usize) -> Member {
    let addr = SocketAddr::from((Ipv6Addr::from([0xff; 16]), u16::MAX));
    Member {
        id: widest_name(i),
        generation: Generation(u64::MAX),
        incarnation: Incarnation(u32::MAX),
        state: MemberState::Left,
        gossip: addr,
        steal: addr,
    }
}

fn widest_report(i: usize) -> LoadReport {
    LoadReport {
        node: widest_name(i),
        generation: Generation(u64::MAX),
        load: Load {
            version: u64::MAX,
            stealable: u32::MAX,
            queued: u32::MAX,
            running: u32::MAX,
            slots: u32::MAX,
            service_us: u32::MAX,
        },
        age_ms: u32::MAX,
    }
}

fn widest_sender() -> Sender {
    Sender { node: widest_name(0), generation: Generation(u64::MAX) }
}

fn malformed<T>(result: Result<T, DatagramError>) -> String {
    match result {
        Err(DatagramError::Decode(DecodeError::Malformed(why))) => why,
        _ => panic!("it should not decode"),
    }
}

/// Every strict prefix is refused, as is anything that follows; a changed bit gives another message
/// or none.
fn damaged_is_refused<T>(
    message: &T,
    bytes: &[u8],
    bit: prop::sample::Index,
    decode: impl Fn(&[u8]) -> Option<T>,
) -> Result<(), TestCaseError>
where
    T: PartialEq + std::fmt::Debug,
{
    for end in 0..bytes.len() {
        prop_assert_eq!(decode(&bytes[..end]), None, "cut to {} of {}", end, bytes.len());
    }
    let mut longer = bytes.to_vec();
    longer.push(0);
    prop_assert_eq!(decode(&longer), None);
    let mut flipped = bytes.to_vec();
    let bit = bit.index(bytes.len() * 8);
    flipped[bit / 8] ^= 1 << (bit % 8);
    let other = decode(&flipped);
    prop_assert_ne!(other.as_ref(), Some(message));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn datagrams_are_read_as_they_were_sent(datagram in datagram(), bit: prop::sample::Index) {
        let message = codec::encode(&datagram);
        prop_assert_eq!(codec::encoded_len(&datagram), message.len());
        let sealed = seal(MESH, &message);
        prop_assert!(sealed.len() <= DATAGRAM_BYTES_MAX);
        prop_assert_eq!(open(MESH, &sealed), Ok(datagram.clone()));
        prop_assert_eq!(open(MeshId(8), &sealed), Err(DatagramError::OtherMesh));
        damaged_is_refused(&datagram, &sealed, bit, |bytes| open(MESH, bytes).ok())?;
    }

    #[test]
    fn gossip_frames_are_read_as_they_were_sent(frame in gossip_frame(), bit: prop::sample::Index) {
        let bytes = encode_frame(&frame).unwrap();
        let (header, payload) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>().unwrap();
        prop_assert_eq!(frame_len(*header), Ok(payload.len()));
        prop_assert_eq!(decode_frame(payload), Ok(frame.clone()));
        damaged_is_refused(&frame, payload, bit, |bytes| decode_frame(bytes).ok())?;
    }

    #[test]
    fn steal_frames_are_read_as_they_were_sent(frame in steal_frame(), bit: prop::sample::Index) {
        let bytes = encode_frame(&frame).unwrap();
        let (header, payload) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>().unwrap();
        prop_assert_eq!(frame_len(*header), Ok(payload.len()));
        prop_assert_eq!(decode_frame(payload), Ok(frame.clone()));
        damaged_is_refused(&frame, payload, bit, |bytes| decode_frame(bytes).ok())?;
    }

    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(open(MESH, &bytes).is_err());
        // Behind a good header they may be a message by chance, and then read back as one.
        if let Ok(datagram) = open(MESH, &seal(MESH, &bytes)) {
            prop_assert_eq!(open(MESH, &seal(MESH, &codec::encode(&datagram))), Ok(datagram));
        }
        let _ = decode_frame::<Hello>(&bytes);
        let _ = decode_frame::<GossipFrame>(&bytes);
        let _ = decode_frame::<StealFrame>(&bytes);
    }

    /// What fits goes in, what does not is left out, and the measure is exact.
    #[test]
    fn a_writer_fills_its_budget_and_no_more(
        from in sender(),
        body in body(),
        items in prop::collection::vec(
            prop_oneof![member().prop_map(Ok), load_report().prop_map(Err)],
            0..150,
        ),
    ) {
        let mut writer = Writer::new(from.clone(), body.clone());
        let (mut updates, mut loads) = (Vec::new(), Vec::new());
        for item in items {
            let left = writer.left();
            let (bytes, fits) = match item {
                Ok(member) => {
                    let fits = writer.update(&member);
                    let bytes = codec::encoded_len(&member);
                    updates.extend(fits.then_some(member));
                    (bytes, fits)
                }
                Err(report) => {
                    let fits = writer.load(&report);
                    let bytes = codec::encoded_len(&report);
                    loads.extend(fits.then_some(report));
                    (bytes, fits)
                }
            };
            prop_assert_eq!(fits, bytes <= left);
            prop_assert_eq!(writer.left(), if fits { left - bytes } else { left });
        }
        let left = writer.left();
        let message = writer.finish();
        prop_assert_eq!(message.len(), DATAGRAM_BODY_BYTES_MAX - left);
        prop_assert_eq!(open(MESH, &seal(MESH, &message)), Ok(Datagram { from, body, updates, loads }));
    }

    #[test]
    fn asks_and_answers_survive_their_frames(
        members in prop::collection::vec(member(), 0..40),
        highest in prop::option::of(number()),
        me in member(),
        holder in addr(),
    ) {
        for ask in [Ask::Join { me }, Ask::Sync { members: members.clone() }, Ask::Ping] {
            prop_assert_eq!(read_ask(&ask_frames(&ask)), Ok(ask));
        }
        let state = Answer::State { members, highest: highest.map(Generation) };
        for answer in [state, Answer::Refused { holder }, Answer::Pong] {
            prop_assert_eq!(read_answer(&answer_frames(&answer)), Ok(answer));
        }
    }

    /// Whatever comes, a reader ends with a message made of frames in their order, or with an error,
    /// and takes nothing after either.
    #[test]
    fn readers_take_no_frame_out_of_place(frames in prop::collection::vec(gossip_frame(), 1..6)) {
        let mut reader = AskReader::default();
        let mut done = false;
        for (i, frame) in frames.iter().enumerate() {
            match reader.frame(frame.clone()) {
                Ok(Some(ask)) => {
                    prop_assert!(!done);
                    prop_assert_eq!(read_ask(&ask_frames(&ask)), Ok(ask.clone()));
                    prop_assert_eq!(matches!(ask, Ask::Sync { .. }), frames[0] == GossipFrame::Sync);
                    done = true;
                }
                Ok(None) => prop_assert!(!done && frames[0] == GossipFrame::Sync, "frame {}", i),
                Err(_) => done = true,
            }
        }
        let mut reader = AnswerReader::default();
        let mut done = false;
        for frame in frames {
            let is_chunk = matches!(frame, GossipFrame::Chunk { .. });
            match reader.frame(frame) {
                Ok(Some(_)) => {
                    prop_assert!(!done);
                    done = true;
                }
                Ok(None) => prop_assert!(!done && is_chunk),
                Err(_) => done = true,
            }
        }
    }
}

fn read_ask(frames: &[GossipFrame]) -> Result<Ask, StreamError> {
    let mut reader = AskReader::default();
    let (last, before) = frames.split_last().expect("an ask has frames");
    for frame in before {
        assert_eq!(reader.frame(frame.clone())?, None);
    }
    let ask = reader.frame(last.clone())?.expect("the last frame completes it");
    assert!(reader.frame(GossipFrame::Ping).is_err(), "nothing follows an ask");
    Ok(ask)
}

fn read_answer(frames: &[GossipFrame]) -> Result<Answer, StreamError> {
    let mut reader = AnswerReader::default();
    let (last, before) = frames.split_last().expect("an answer has frames");
    for frame in before {
        assert_eq!(reader.frame(frame.clone())?, None);
    }
    let answer = reader.frame(last.clone())?.expect("the last frame completes it");
    assert!(reader.frame(GossipFrame::Pong).is_err(), "nothing follows an answer");
    Ok(answer)
}

#[test]
fn the_widest_records_are_as_wide_as_the_limits_say() {
    assert_eq!(codec::encoded_len(&widest_member(0)), MEMBER_BYTES_MAX);
    let report = codec::encoded_len(&widest_report(0));
    assert_eq!(report, NAME_BYTES_MAX + 1 + 9 + (9 + 5 * 5) + 5);
}

#[test]
fn the_widest_bodies_leave_room_for_the_senders_load() {
    let addr = widest_member(0).gossip;
    let id = JobId::from_bytes([0xff; 16]);
    for body in [
        Body::Ping { seq: u32::MAX, to: widest_name(1) },
        Body::Ack { seq: u32::MAX },
        Body::PingReq { seq: u32::MAX, target: widest_name(1), addr },
        Body::AckRelay { seq: u32::MAX, target: widest_sender() },
        Body::Finished { jobs: vec![id; FINISHED_IDS_MAX] },
    ] {
        let mut writer = Writer::new(widest_sender(), body.clone());
        assert!(writer.load(&widest_report(0)), "{body:?}");
        if !matches!(body, Body::Finished { .. }) {
            let updates = (0..).take_while(|&i| writer.update(&widest_member(i))).count();
            assert!(updates >= 7, "{updates} updates beside {body:?}");
        }
        assert!(seal(MESH, &writer.finish()).len() <= DATAGRAM_BYTES_MAX);
    }
}

#[test]
fn counts_never_need_a_second_byte() {
    let mut writer = Writer::new(
        Sender { node: NodeId::new("a").unwrap(), generation: Generation(0) },
        Body::Leave,
    );
    let smallest = LoadReport {
        node: NodeId::new("b").unwrap(),
        generation: Generation(0),
        load: Load::default(),
        age_ms: 0,
    };
    let loads = (0..).take_while(|_| writer.load(&smallest)).count();
    assert_eq!(codec::encoded_len(&smallest), 10);
    assert!(loads < DATAGRAM_ITEMS_MAX);
    let left = writer.left();
    assert_eq!(writer.finish().len(), DATAGRAM_BODY_BYTES_MAX - left);
}

#[test]
fn the_header_says_why_a_datagram_is_not_for_this_node() {
    let good = seal(MESH, &codec::encode(&0_u8));
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        open(MESH, &bytes)
    };
    assert_eq!(open(MESH, &[]), Err(DatagramError::Foreign));
    assert_eq!(open(MESH, &good[..7]), Err(DatagramError::Foreign));
    assert_eq!(with(0, 0), Err(DatagramError::Foreign));
    assert_eq!(with(2, 9), Err(DatagramError::Version(9)));
    assert_eq!(with(3, 5), Err(DatagramError::Key(5)));
    assert_eq!(with(4, 1), Err(DatagramError::OtherMesh));
    assert!(matches!(open(MESH, &good), Err(DatagramError::Decode(_))));
}

#[test]
fn a_peer_of_another_kind_is_refused_at_the_greeting() {
    let hello = Hello::new(MESH, widest_sender());
    assert_eq!(hello.clone().accept(MESH), Ok(widest_sender()));
    assert_eq!(hello.clone().accept(MeshId(8)), Err(StreamError::OtherMesh));
    let with = |at: usize, byte: u8| {
        let mut bytes = codec::encode(&hello);
        bytes[at] = byte;
        decode_frame::<Hello>(&bytes).unwrap().accept(MESH)
    };
    assert_eq!(with(1, 0), Err(StreamError::Foreign));
    assert_eq!(with(3, 2), Err(StreamError::Version(2)));
}

/// Fails at the length, not after reading, or reserving, what it announces.
#[test]
fn an_announced_length_is_not_believed() {
    let long = [0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let behind = |start: &[u8]| seal(MESH, &[start, &long].concat());
    // Sender "a", generation 0, Leave; then the updates.
    let updates = malformed(open(MESH, &behind(&[1, b'a', 0, 5])));
    assert!(updates.contains("a list of at most 250"), "{updates}");
    // No updates; then the loads.
    let loads = malformed(open(MESH, &behind(&[1, b'a', 0, 5, 0])));
    assert!(loads.contains("a list of at most 250"), "{loads}");
    // Finished; then the ids.
    let ids = malformed(open(MESH, &behind(&[1, b'a', 0, 8])));
    assert!(ids.contains("a list of at most 64"), "{ids}");
    // The sender's name.
    assert_eq!(malformed(open(MESH, &behind(&[]))), "LimitExceeded");

    let frame = |start: &[u8]| decode_frame::<GossipFrame>(&[start, &long].concat());
    let chunk = frame(&[2]).unwrap_err().to_string();
    assert!(chunk.contains("a list of at most 512"), "{chunk}");
    let frame = |start: &[u8]| decode_frame::<StealFrame>(&[start, &long].concat());
    for start in [&[1, 0, 0, 0][..], &[2, 0]] {
        let list = frame(start).unwrap_err().to_string();
        assert!(list.contains("a list of at most 1024"), "{list}");
    }
}

/// The texts announce a petabyte, and the limit allows it: were it reserved, the test would not end.
#[test]
fn a_text_is_read_from_the_bytes_that_are_there() {
    const NO_LIMIT: usize = 1 << 60;
    let text = |announced: u64| [&[0xfd][..], &announced.to_le_bytes(), b"a"].concat();
    let name = codec::decode::<NodeId, NO_LIMIT>(&text(1 << 50)).unwrap_err();
    assert!(name.to_string().contains("UnexpectedEnd"), "{name}");
    // A job's id and handler; then the arguments, or empty arguments and the key.
    for after in [&b""[..], &[0, 1]] {
        let job = [&[0xff; 16][..], &[1, b'h'], after, &text(1 << 50)].concat();
        let job = codec::decode::<JobSpec, NO_LIMIT>(&job).unwrap_err();
        assert!(job.to_string().contains("UnexpectedEnd"), "{job}");
    }
}

#[test]
fn a_name_that_is_none_does_not_decode() {
    for (bytes, why) in [(&[0][..], "must not be empty"), (&[2, b'a', b' '], "visible text")] {
        let error = codec::decode::<NodeId, DATAGRAM_DECODE_BYTES_MAX>(bytes).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn a_list_one_longer_than_its_bound_is_refused() {
    let finished = |n: usize| {
        let body = Body::Finished { jobs: vec![JobId::from_bytes([0; 16]); n] };
        codec::decode::<Body, DATAGRAM_DECODE_BYTES_MAX>(&codec::encode(&body))
    };
    assert!(finished(FINISHED_IDS_MAX).is_ok());
    assert!(finished(FINISHED_IDS_MAX + 1).is_err());
    let chunk = |n: usize| {
        let members = (0..n).map(widest_member).collect();
        let frame = encode_frame(&GossipFrame::Chunk { members, last: true }).unwrap();
        decode_frame::<GossipFrame>(&frame[FRAME_HEADER_BYTES..])
    };
    assert!(chunk(STATE_CHUNK_MEMBERS_MAX).is_ok());
    assert!(chunk(STATE_CHUNK_MEMBERS_MAX + 1).is_err());
    let settle = |n: usize| {
        let taken = vec![JobId::from_bytes([0; 16]); n];
        let frame = encode_frame(&StealFrame::Settle { offer: 1, taken }).unwrap();
        decode_frame::<StealFrame>(&frame[FRAME_HEADER_BYTES..])
    };
    assert!(settle(STEAL_BATCH_MAX).is_ok());
    assert!(settle(STEAL_BATCH_MAX + 1).is_err());
}

#[test]
fn a_full_table_travels_in_frames_that_fit_and_a_fuller_one_is_refused() {
    let mut members: Vec<Member> = (0..MEMBERS_MAX).map(widest_member).collect();
    let ask = Ask::Sync { members: members.clone() };
    let frames = ask_frames(&ask);
    assert_eq!(frames.len(), 1 + MEMBERS_MAX / STATE_CHUNK_MEMBERS_MAX);
    for frame in &frames {
        assert!(encode_frame(frame).unwrap().len() <= FRAME_HEADER_BYTES + FRAME_BYTES_MAX);
    }
    assert_eq!(read_ask(&frames), Ok(ask));

    members.push(widest_member(MEMBERS_MAX));
    let over = Err(StreamError::Unexpected("a member table over its bound"));
    assert_eq!(read_ask(&ask_frames(&Ask::Sync { members: members.clone() })), over);
    let answer = Answer::State { members, highest: None };
    let over = Err(StreamError::Unexpected("a member table over its bound"));
    assert_eq!(read_answer(&answer_frames(&answer)), over);
}

#[test]
fn a_reader_refuses_what_has_no_place() {
    let chunk = |n: usize, last| GossipFrame::Chunk { members: vec![widest_member(n)], last };
    let end = GossipFrame::End { highest: None };
    let empty = GossipFrame::Chunk { members: vec![], last: false };
    let pong = GossipFrame::Pong;

    let asks = |frames: &[&GossipFrame]| {
        let mut reader = AskReader::default();
        frames.iter().map(|frame| reader.frame((*frame).clone()).is_ok()).collect::<Vec<_>>()
    };
    let sync = GossipFrame::Sync;
    assert_eq!(asks(&[&chunk(0, true)]), [false], "a chunk that nobody announced");
    assert_eq!(asks(&[&sync, &sync]), [true, false]);
    assert_eq!(asks(&[&sync, &GossipFrame::Ping]), [true, false]);
    assert_eq!(asks(&[&sync, &empty]), [true, false], "it could go on for ever");
    assert_eq!(asks(&[&pong, &GossipFrame::Ping]), [false, false], "an error is final");
    assert_eq!(asks(&[&end]), [false]);

    let answers = |frames: &[&GossipFrame]| {
        let mut reader = AnswerReader::default();
        frames.iter().map(|frame| reader.frame((*frame).clone()).is_ok()).collect::<Vec<_>>()
    };
    assert_eq!(answers(&[&end]), [false], "an end without a table");
    assert_eq!(answers(&[&chunk(0, false), &end]), [true, false], "before the last chunk");
    assert_eq!(answers(&[&chunk(0, true), &chunk(1, true)]), [true, false], "after it");
    assert_eq!(answers(&[&chunk(0, false), &pong]), [true, false]);
    assert_eq!(answers(&[&empty]), [false]);
    assert_eq!(answers(&[&sync]), [false]);
}

#[test]
fn a_frame_too_long_is_neither_sent_nor_read() {
    assert_eq!(frame_len([0, 0x10, 0, 0]), Ok(FRAME_BYTES_MAX));
    assert_eq!(frame_len([0, 0x10, 0, 1]), Err(StreamError::TooLong(FRAME_BYTES_MAX + 1)));
    assert_eq!(frame_len([0xff; 4]), Err(StreamError::TooLong(u32::MAX as usize)));
    // "GET " by someone who took the port for a web server.
    assert_eq!(frame_len(*b"GET "), Err(StreamError::TooLong(0x4745_5420)));
    let text = "x".repeat(FRAME_BYTES_MAX);
    assert_eq!(encode_frame(&text), Err(StreamError::TooLong(FRAME_BYTES_MAX + 5)));
}

#[test]
fn the_largest_offers_fit_a_frame() {
    let claim = Claim { job: JobId::from_bytes([0xff; 16]), token: FencingToken(u64::MAX) };
    let offer = |jobs| {
        StealFrame::Offer(Offer {
            seq: u32::MAX,
            offer: u64::MAX,
            expires_ms: u32::MAX,
            jobs,
            load: Some(widest_report(0)),
        })
    };
    let named = offer(vec![OfferedJob::Named(claim); STEAL_BATCH_MAX]);
    let bytes = encode_frame(&named).unwrap();
    assert!(bytes.len() < FRAME_BYTES_MAX / 32, "{} bytes", bytes.len());
    assert_eq!(decode_frame(&bytes[FRAME_HEADER_BYTES..]), Ok(named));

    // A job whose arguments just travel inline, with everything else at its widest.
    let spec = JobSpec {
        id: claim.job,
        handler: HandlerName::new("h".repeat(NAME_BYTES_MAX)).unwrap(),
        arguments: Arc::from("x".repeat(INLINE_ARGUMENT_BYTES_MAX)),
        key: Some(Arc::from("k".repeat(KEY_BYTES_MAX))),
        tenant: Tenant::new("t".repeat(NAME_BYTES_MAX)).unwrap(),
        priority: i16::MIN,
        run_at_ms: u64::MAX,
        max_attempts: u32::MAX,
        pinned: true,
        origin: widest_name(0),
        enqueued_ms: u64::MAX,
    };
    let job = ClaimedJob { spec: Arc::new(spec), token: claim.token, attempt: u32::MAX };
    let whole = offer(vec![OfferedJob::Whole(job); 16]);
    let bytes = encode_frame(&whole).unwrap();
    assert_eq!(decode_frame(&bytes[FRAME_HEADER_BYTES..]), Ok(whole));
}

/// The scope of a link-local address names an interface of this machine and means nothing to
/// others, so it is not sent.
#[test]
fn the_scope_of_an_ipv6_address_stays_at_home() {
    let ip = "fe80::1".parse().unwrap();
    let local = SocketAddr::V6(SocketAddrV6::new(ip, 80, 1, 2));
    let sent = codec::encode(&GossipFrame::Refused { holder: local });
    let holder = SocketAddr::V6(SocketAddrV6::new(ip, 80, 0, 0));
    assert_eq!(decode_frame(&sent), Ok(GossipFrame::Refused { holder }));
}
