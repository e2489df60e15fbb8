//! The detector by its exact effects.

use proptest::prelude::*;

use super::*;
use crate::limits::{
    DATAGRAM_BODY_BYTES_MAX, DATAGRAM_DECODE_BYTES_MAX, NAME_BYTES_MAX, RELAYS_MAX,
};
use crate::wire::codec;

const PERIOD: Duration = Duration::from_millis(100);

fn ms(n: u64) -> Instant {
    Instant::from_micros(1_000 * n)
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

fn member(name: &str, port: u16) -> Member {
    Member {
        id: id(name),
        generation: Generation(1),
        incarnation: Incarnation(0),
        state: MemberState::Alive,
        gossip: addr(port),
        steal: addr(port + 1),
    }
}

fn with(member: &Member, incarnation: u32, state: MemberState) -> Member {
    Member { incarnation: Incarnation(incarnation), state, ..member.clone() }
}

fn changed(members: &[Member]) -> Changed {
    Changed { members: members.to_vec(), forgotten: Vec::new() }
}

fn from(member: &Member, body: Body) -> Datagram {
    let from = Sender { node: member.id.clone(), generation: member.generation };
    Datagram { from, body, updates: Vec::new(), loads: Vec::new() }
}

/// A detector that knows `peers`, with its news of them already spread, and its period at 100 ms.
fn detector(peers: &[Member]) -> Detector {
    let config = SwimConfig { protocol_period: PERIOD, ..SwimConfig::default() };
    let mut detector = Detector::new(config, member("me", 1), 1);
    detector.handle_changed(ms(0), changed(peers));
    for peer in peers {
        detector.composer.queue.forget(&peer.id);
    }
    detector.period_at = Some(ms(100));
    detector
}

/// What a detector sent and told, its messages decoded.
#[derive(Debug, PartialEq, Eq)]
enum Out {
    Sent(SocketAddr, Body),
    Told(Effect),
}

fn datagrams(detector: &mut Detector) -> Vec<(SocketAddr, Datagram)> {
    std::iter::from_fn(|| detector.poll_effect())
        .filter_map(|effect| match effect {
            Effect::Transmit { to, message } => Some((to, decode(&message))),
            _ => None,
        })
        .collect()
}

fn decode(message: &[u8]) -> Datagram {
    assert!(message.len() <= DATAGRAM_BODY_BYTES_MAX);
    codec::decode::<Datagram, DATAGRAM_DECODE_BYTES_MAX>(message).unwrap()
}

fn outs(detector: &mut Detector) -> Vec<Out> {
    std::iter::from_fn(|| detector.poll_effect())
        .map(|effect| match effect {
            Effect::Transmit { to, message } => Out::Sent(to, decode(&message).body),
            other => Out::Told(other),
        })
        .collect()
}

fn verdict(name: &str, state: MemberState) -> Out {
    let (generation, incarnation) = (Generation(1), Incarnation(0));
    Out::Told(Effect::Verdict(Verdict { id: id(name), generation, incarnation, state }))
}

#[test]
fn a_ping_is_answered_by_whom_it_is_meant_for_and_nobody_else() {
    let a = member("a", 10);
    let mut detector = detector(std::slice::from_ref(&a));
    let ping = |to: &str| Body::Ping { seq: 7, to: id(to) };
    detector.handle_datagram(ms(1), addr(99), from(&a, ping("me")));
    assert_eq!(outs(&mut detector), [Out::Sent(addr(99), Body::Ack { seq: 7 })]);
    detector.handle_datagram(ms(1), addr(99), from(&a, ping("b")));
    assert_eq!(outs(&mut detector), []);
    assert_eq!(detector.counters().pings_misaddressed, 1);
}

#[test]
fn silence_is_asked_of_others_and_by_stream_and_then_becomes_a_suspicion() {
    let a = member("a", 10);
    let mut detector = detector(std::slice::from_ref(&a));
    detector.handle_timeout(ms(100));
    let Body::Ping { seq, .. } = datagrams(&mut detector)[0].1.body else { panic!("a ping") };
    detector.handle_changed(ms(101), changed(&[member("b", 20), member("c", 30)]));
    assert_eq!(detector.poll_timeout(), Some(ms(150)));
    detector.handle_timeout(ms(150));
    let mut sent = outs(&mut detector);
    let stream = Effect::StreamPing { id: 1, to: addr(10), target: id("a") };
    assert_eq!(sent.pop(), Some(Out::Told(stream)));
    let request =
        |port| Out::Sent(addr(port), Body::PingReq { seq, target: id("a"), addr: addr(10) });
    sent.sort_by_key(|out| matches!(out, Out::Sent(to, _) if to.port() == 30));
    assert_eq!(sent, [request(20), request(30)]);
    assert_eq!(detector.poll_timeout(), Some(ms(200)));
    detector.handle_timeout(ms(200));
    assert_eq!(outs(&mut detector)[0], verdict("a", MemberState::Suspect));
    assert_eq!(detector.counters().probes_failed, 1);
}

#[test]
fn an_accuser_goes_on_asking_the_accused_until_it_refutes_or_dies() {
    let a = member("a", 10);
    let mut detector = detector(std::slice::from_ref(&a));
    for now in [100, 150, 200] {
        detector.handle_timeout(ms(now));
    }
    outs(&mut detector);
    let suspect = with(&a, 0, MemberState::Suspect);
    detector.handle_changed(ms(201), changed(std::slice::from_ref(&suspect)));
    let to_a = |detector: &mut Detector| {
        let now = detector.period_at.unwrap();
        detector.probe = None;
        detector.handle_timeout(now);
        let sent = datagrams(detector).into_iter();
        sent.filter(|(to, _)| *to == addr(10))
            .map(|(_, d)| d.updates[0].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(to_a(&mut detector), [suspect.clone(), suspect], "by its turn, and besides");
    detector.handle_changed(ms(700), changed(&[with(&a, 1, MemberState::Alive)]));
    assert_eq!(to_a(&mut detector), [member("me", 1)], "by its turn alone");
}

#[test]
fn an_answer_counts_only_from_the_probed_id_and_not_from_an_older_boot() {
    let (a, b) = (Member { generation: Generation(5), ..member("a", 10) }, member("b", 20));
    let older = Member { generation: Generation(4), ..a.clone() };
    let newer = Member { generation: Generation(6), ..a.clone() };
    for (by, counts) in [(&a, true), (&newer, true), (&older, false), (&b, false)] {
        let mut detector = detector(std::slice::from_ref(&a));
        detector.handle_timeout(ms(100));
        let Body::Ping { seq, .. } = datagrams(&mut detector)[0].1.body else { panic!("a ping") };
        detector.handle_datagram(ms(110), by.gossip, from(by, Body::Ack { seq: seq ^ 1 }));
        assert_eq!(detector.counters().probes_answered, 0, "another number");
        detector.handle_datagram(ms(110), by.gossip, from(by, Body::Ack { seq }));
        assert_eq!(detector.counters().probes_answered, u64::from(counts), "{by:?}");
        detector.handle_timeout(ms(150));
        detector.handle_timeout(ms(200));
        let accused = outs(&mut detector).contains(&Out::Told(Effect::Verdict(Verdict {
            id: id("a"),
            generation: Generation(5),
            incarnation: Incarnation(0),
            state: MemberState::Suspect,
        })));
        assert_eq!(accused, !counts, "{by:?}");
    }
}

#[test]
fn a_relayed_answer_and_a_stream_count_as_answers() {
    let (a, b) = (member("a", 10), member("b", 20));
    let by_a = Sender { node: id("a"), generation: Generation(1) };
    for by_stream in [false, true] {
        let mut detector = detector(std::slice::from_ref(&a));
        detector.handle_timeout(ms(100));
        let Body::Ping { seq, .. } = datagrams(&mut detector)[0].1.body else { panic!("a ping") };
        detector.handle_timeout(ms(150));
        if by_stream {
            detector.handle_stream_ping(ms(160), 1, Ok(by_a.clone()));
        } else {
            let relayed = Body::AckRelay { seq, target: by_a.clone() };
            detector.handle_datagram(ms(160), b.gossip, from(&b, relayed));
        }
        assert_eq!(detector.counters().probes_answered, 1);
        assert_eq!(detector.counters().probes_answered_by_stream, u64::from(by_stream));
    }
}

#[test]
fn every_member_is_probed_once_a_round_and_a_newcomer_within_it() {
    let peers: Vec<Member> = (0..10).map(|i| member(&format!("m{i}"), 10 + i)).collect();
    let mut detector = detector(&peers);
    let mut rounds = Vec::new();
    for round in 0..3 {
        let mut probed = Vec::new();
        for turn in 0..(if round == 1 { 11 } else { 10 }) {
            if (round, turn) == (1, 5) {
                detector.handle_changed(detector.period_at.unwrap(), changed(&[member("new", 99)]));
            }
            if (round, turn) == (2, 0) {
                let left = with(&member("new", 99), 0, MemberState::Left);
                detector.handle_changed(detector.period_at.unwrap(), changed(&[left]));
            }
            let now = detector.period_at.unwrap();
            detector.handle_timeout(now);
            for (to, datagram) in datagrams(&mut detector) {
                let Body::Ping { seq, to: target } = datagram.body else { continue };
                let by = Member { id: target.clone(), ..member("x", to.port()) };
                probed.push(target);
                detector.handle_datagram(now, to, from(&by, Body::Ack { seq }));
            }
        }
        rounds.push(probed);
    }
    for (probed, size) in rounds.iter().zip([10, 11, 10]) {
        let distinct: BTreeSet<_> = probed.iter().collect();
        assert_eq!((probed.len(), distinct.len()), (size, size));
    }
    assert_ne!(rounds[0], rounds[2], "each round is shuffled");
}

#[test]
fn an_indirect_probe_is_made_relayed_and_else_denied_in_time() {
    let (a, b) = (member("a", 10), member("b", 20));
    let mut detector = detector(&[a.clone(), b.clone()]);
    detector.period_at = Some(ms(10_000));
    let request = Body::PingReq { seq: 7, target: id("b"), addr: addr(20) };
    detector.handle_datagram(ms(0), addr(10), from(&a, request.clone()));
    let sent = outs(&mut detector);
    let [Out::Sent(to, Body::Ping { seq, .. })] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(*to, addr(20));
    assert_eq!(detector.poll_timeout(), Some(ms(20)), "a fifth of a period");
    detector.handle_timeout(ms(20));
    assert_eq!(outs(&mut detector), [Out::Sent(addr(10), Body::Nack { seq: 7 })]);
    // Only the target's own answer is relayed, and once.
    detector.handle_datagram(ms(25), addr(10), from(&a, Body::Ack { seq: *seq }));
    assert_eq!(outs(&mut detector), []);
    let relayed =
        Body::AckRelay { seq: 7, target: Sender { node: id("b"), generation: Generation(1) } };
    detector.handle_datagram(ms(30), addr(20), from(&b, Body::Ack { seq: *seq }));
    assert_eq!(outs(&mut detector), [Out::Sent(addr(10), relayed)]);
    detector.handle_datagram(ms(31), addr(20), from(&b, Body::Ack { seq: *seq }));
    assert_eq!(outs(&mut detector), []);
    assert_eq!(detector.open_relays(), 0);
}

#[test]
fn a_stranger_cannot_make_this_node_ping_anyone_and_members_only_so_many() {
    let (a, stranger) = (member("a", 10), member("stranger", 66));
    let mut detector = detector(std::slice::from_ref(&a));
    let request = Body::PingReq { seq: 7, target: id("b"), addr: addr(20) };
    detector.handle_datagram(ms(0), addr(66), from(&stranger, request.clone()));
    assert_eq!(outs(&mut detector), []);
    for _ in 0..RELAYS_MAX + 5 {
        detector.handle_datagram(ms(0), addr(10), from(&a, request.clone()));
    }
    assert_eq!(datagrams(&mut detector).len(), RELAYS_MAX);
    assert_eq!(detector.counters().relays_refused, 1 + 5);
}

#[test]
fn a_suspicion_ends_in_death_at_its_time_and_a_refutation_stops_it() {
    let a = member("a", 10);
    let lasts = suspicion::timeout(4, 2, PERIOD);
    let mut detector = detector(std::slice::from_ref(&a));
    detector.period_at = Some(ms(10_000));
    detector.handle_changed(ms(0), changed(&[with(&a, 0, MemberState::Suspect)]));
    assert_eq!(detector.poll_timeout(), Some(ms(0) + lasts));
    detector.handle_changed(ms(1), changed(&[with(&a, 1, MemberState::Alive)]));
    assert_eq!(detector.poll_timeout(), Some(ms(10_000)), "refuted");
    detector.handle_changed(ms(2), changed(&[with(&a, 1, MemberState::Suspect)]));
    detector.handle_changed(ms(50), changed(&[with(&a, 1, MemberState::Suspect)]));
    assert_eq!(detector.poll_timeout(), Some(ms(2) + lasts), "saying it again prolongs nothing");
    detector.handle_timeout(ms(2) + lasts);
    let dead = Verdict {
        id: id("a"),
        generation: Generation(1),
        incarnation: Incarnation(1),
        state: MemberState::Dead,
    };
    assert_eq!(outs(&mut detector), [Out::Told(Effect::Verdict(dead))]);
}

#[test]
fn whoever_is_not_alive_hears_so_first_in_every_datagram() {
    let a = member("a", 10);
    for state in [MemberState::Suspect, MemberState::Dead, MemberState::Left] {
        let said = with(&a, 3, state);
        let mut detector = detector(&[said.clone(), member("b", 20)]);
        let ping = Body::Ping { seq: 1, to: id("me") };
        detector.handle_datagram(ms(1), a.gossip, from(&a, ping));
        let (_, ack) = datagrams(&mut detector).remove(0);
        assert_eq!(ack.updates[..2], [said, member("me", 1)]);
    }
    // A boot that a newer one has outlived hears of the newer.
    let newer = Member { generation: Generation(2), gossip: addr(11), ..a.clone() };
    let mut detector = detector(std::slice::from_ref(&newer));
    detector.handle_datagram(ms(1), a.gossip, from(&a, Body::Ping { seq: 1, to: id("me") }));
    assert_eq!(datagrams(&mut detector)[0].1.updates[0], newer);
}

#[test]
fn a_refutation_is_told_at_once_to_whoever_passed_the_accusation_on() {
    let (a, b) = (member("a", 10), member("b", 20));
    let mut detector = detector(&[a.clone(), b]);
    let accusation = with(&member("me", 1), 0, MemberState::Suspect);
    let mut ping = from(&a, Body::Ping { seq: 1, to: id("me") });
    ping.updates.push(accusation.clone());
    detector.handle_datagram(ms(1), addr(77), ping);
    let heard = Heard { updates: vec![accusation], loads: Vec::new() };
    assert_eq!(outs(&mut detector)[0], Out::Told(Effect::Heard(heard)));
    let refuted = with(&member("me", 1), 1, MemberState::Alive);
    detector.handle_changed(ms(2), changed(std::slice::from_ref(&refuted)));
    let sent = datagrams(&mut detector);
    let told: BTreeSet<u16> = sent.iter().map(|(to, _)| to.port()).collect();
    assert_eq!(told, BTreeSet::from([20, 77]), "a where it spoke from, and another");
    assert!(sent.iter().all(|(_, datagram)| datagram.updates[0] == refuted));
}

#[test]
fn a_node_that_was_stalled_accuses_nobody_and_gives_suspects_its_lost_time() {
    let (a, b) = (member("a", 10), member("b", 20));
    let mut detector = detector(std::slice::from_ref(&a));
    let lasts = suspicion::timeout(4, 3, PERIOD);
    detector.handle_changed(ms(0), changed(std::slice::from_ref(&b)));
    detector.handle_changed(ms(100), changed(&[with(&b, 0, MemberState::Suspect)]));
    detector.handle_timeout(ms(100));
    outs(&mut detector);
    // The probe's half was due at 150 ms; the node wakes three seconds later.
    detector.handle_timeout(ms(3_150));
    let told = outs(&mut detector);
    assert!(told.iter().all(|out| matches!(out, Out::Sent(..))), "{told:?}");
    assert_eq!(detector.counters().rounds_voided, 1);
    let deadline = detector.suspicions.next_deadline();
    assert_eq!(deadline, Some(ms(100) + lasts + Duration::from_secs(3) + PERIOD));
}

#[test]
fn replies_to_the_dead_and_to_strangers_are_no_storm() {
    let dead = with(&member("dead", 10), 0, MemberState::Dead);
    let mut detector = detector(std::slice::from_ref(&dead));
    for seq in 0..10 * STRANGER_REPLIES_MAX {
        let ping = from(&dead, Body::Ping { seq, to: id("me") });
        detector.handle_datagram(ms(1), dead.gossip, ping);
    }
    assert_eq!(datagrams(&mut detector).len(), STRANGER_REPLIES_MAX as usize);
    detector.handle_timeout(ms(100));
    let ping = from(&dead, Body::Ping { seq: 1, to: id("me") });
    detector.handle_datagram(ms(101), dead.gossip, ping);
    assert_eq!(datagrams(&mut detector).len(), 1, "the next period has its own");
}

#[test]
fn a_departure_goes_first_however_much_other_news_there_is() {
    let peers: Vec<Member> = (0..200).map(|i| member(&format!("member-{i}"), 10 + i)).collect();
    let config = SwimConfig { protocol_period: PERIOD, ..SwimConfig::default() };
    let mut detector = Detector::new(config, member("me", 1), 1);
    let load = Load { version: 1, queued: 5, ..Load::default() };
    detector.set_load(load);
    detector.handle_changed(ms(0), changed(&peers));
    detector.handle_leave(ms(1));
    let sent = datagrams(&mut detector);
    assert_eq!(sent.len(), LEAVE_FANOUT);
    let left = with(&member("me", 1), 0, MemberState::Left);
    for (_, datagram) in sent {
        assert_eq!((&datagram.body, &datagram.updates[0]), (&Body::Leave, &left));
        assert!(datagram.updates.len() > 10, "and news of others fills the rest");
        assert_eq!(datagram.loads[0].load, load, "news does not crowd out the own load");
    }
    assert_eq!(detector.poll_timeout(), None, "it was not started, and probes nobody");
}

#[test]
fn no_datagram_outgrows_its_budget_however_long_the_names_and_many_the_members() {
    let long = |i: u16| format!("{i:0>width$}", width = NAME_BYTES_MAX);
    let v6 = |port| SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 1], port));
    let wide = |i: u16| Member {
        id: id(&long(i)),
        generation: Generation(u64::MAX),
        incarnation: Incarnation(u32::MAX - 1),
        state: if i.is_multiple_of(2) { MemberState::Alive } else { MemberState::Suspect },
        gossip: v6(60_000 - i),
        steal: v6(60_000),
    };
    let peers: Vec<Member> = (1..600).map(wide).collect();
    let config = SwimConfig { indirect_ping_count: 16, ..SwimConfig::default() };
    let mut detector = Detector::new(config, wide(0), 1);
    detector.set_load(Load { version: u64::MAX, stealable: u32::MAX, ..Load::default() });
    detector.start(ms(0));
    detector.handle_changed(ms(0), changed(&peers));
    let mut requests = 0;
    for _ in 0..50 {
        let now = detector.poll_timeout().unwrap();
        detector.handle_timeout(now);
        let request = Body::PingReq { seq: 1, target: id(&long(9)), addr: v6(1) };
        let mut asker = from(&peers[7], request);
        asker.loads = (1..20)
            .map(|i| LoadReport {
                node: id(&long(i)),
                generation: Generation(1),
                load: Load::default(),
                age_ms: 0,
            })
            .collect();
        detector.handle_datagram(now, v6(1), asker);
        for (_, datagram) in datagrams(&mut detector) {
            requests += usize::from(matches!(datagram.body, Body::PingReq { .. }));
            assert!(datagram.updates.len() >= 2, "the sender's record always fits: {datagram:?}");
        }
    }
    assert!(requests > 0, "the largest body was among them");
}

#[test]
fn loads_of_others_go_round_and_stale_ones_stop() {
    let peers: Vec<Member> = (0..3).map(|i| member(&format!("m{i}"), 10 + i)).collect();
    let mut detector = detector(&peers);
    detector.set_load(Load { version: 9, ..Load::default() });
    let mut news = from(&peers[0], Body::Nudge);
    news.loads = ["m0", "m1", "nobody"]
        .map(|name| LoadReport {
            node: id(name),
            generation: Generation(1),
            load: Load { version: 1, queued: 3, ..Load::default() },
            age_ms: 1_000,
        })
        .to_vec();
    detector.period_at = Some(ms(60_000));
    detector.handle_datagram(ms(5_000), addr(10), news.clone());
    let expected: Vec<LoadReport> = news.loads[..2].to_vec();
    let heard = Heard { updates: Vec::new(), loads: expected };
    assert_eq!(outs(&mut detector), [Out::Told(Effect::Heard(heard))], "nobody is no member");
    let ask = |detector: &mut Detector, now| {
        let ping = from(&peers[2], Body::Ping { seq: 1, to: id("me") });
        detector.period_at = Some(now);
        detector.handle_datagram(now, addr(12), ping);
        let (_, ack) = datagrams(detector).remove(0);
        ack.loads.iter().map(|l| (l.node.to_string(), l.age_ms)).collect::<Vec<_>>()
    };
    let of = |name: &str, age| (name.to_string(), age);
    assert_eq!(ask(&mut detector, ms(5_020)), [of("me", 0), of("m0", 1_020), of("m1", 1_020)]);
    assert_eq!(ask(&mut detector, ms(14_001)), [of("me", 0)], "older than ten seconds");
}

fn any_member() -> impl Strategy<Value = Member> {
    (0..6u8, 0..3u64, 0..4u32, 0..4u8, 0..3u16).prop_map(|(name, generation, inc, state, port)| {
        use MemberState::{Alive, Dead, Left, Suspect};
        Member {
            id: id(["me", "a", "b", "c", "d", "e"][usize::from(name)]),
            generation: Generation(generation),
            incarnation: Incarnation(if inc == 3 { u32::MAX } else { inc }),
            state: [Alive, Suspect, Dead, Left][usize::from(state)],
            gossip: addr(port),
            steal: addr(port),
        }
    })
}

fn any_body() -> impl Strategy<Value = Body> {
    let name = prop_oneof![Just("me"), Just("a"), Just("b"), Just("zz")].prop_map(id);
    (0..9u8, 0..4u32, name, 0..3u64).prop_map(|(kind, seq, node, generation)| match kind {
        0 => Body::Ping { seq, to: node },
        1 => Body::Ack { seq },
        2 => Body::Nack { seq },
        3 => Body::PingReq { seq, target: node, addr: addr(9) },
        4 => Body::AckRelay { seq, target: Sender { node, generation: Generation(generation) } },
        5 => Body::Leave,
        6 => Body::SurplusHint { stealable: seq },
        _ => Body::Nudge,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever comes, in whatever order, at whatever time: no panic, every message in budget, and
    /// a wake-up always set.
    #[test]
    fn no_input_breaks_it(
        inputs in proptest::collection::vec(
            (any_member(), any_body(), proptest::collection::vec(any_member(), 0..4), 0..300u64),
            0..60,
        )
    ) {
        let mut detector = detector(&[]);
        detector.seq = 0;
        let mut now = ms(1);
        for (sender, body, members, later) in inputs {
            now = now + Duration::from_millis(later);
            if later % 3 == 0 {
                let forgotten = if later % 2 == 0 { vec![id("a")] } else { Vec::new() };
                detector.handle_changed(now, Changed { members: members.clone(), forgotten });
            }
            let mut datagram = from(&sender, body);
            datagram.updates = members;
            detector.handle_datagram(now, sender.gossip, datagram);
            detector.handle_stream_ping(now, later % 5, Ok(Sender {
                node: sender.id,
                generation: sender.generation,
            }));
            detector.handle_timeout(now);
            outs(&mut detector);
            prop_assert!(detector.poll_timeout().is_some());
        }
    }
}
