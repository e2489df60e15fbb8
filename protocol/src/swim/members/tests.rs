//! Members by their exact effects.

use proptest::prelude::*;

use super::*;
use crate::limits::{FRAME_BYTES_MAX, STATE_CHUNK_MEMBERS_MAX};
use crate::load::{Load, LoadReport};
use crate::wire::stream::{AnswerReader, answer_frames, encode_frame};

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

fn boot(name: &str, port: u16, generation: u64) -> Member {
    Member { generation: Generation(generation), ..member(name, port) }
}

fn with(member: &Member, incarnation: u32, state: MemberState) -> Member {
    Member { incarnation: Incarnation(incarnation), state, ..member.clone() }
}

fn sender(member: &Member) -> Sender {
    Sender { node: member.id.clone(), generation: member.generation }
}

fn config() -> SwimConfig {
    SwimConfig { protocol_period: PERIOD, ..SwimConfig::default() }
}

/// Members of "me" at generation 5, started, with what that put out already taken.
fn members(seeds: &[&str]) -> Members {
    let seeds = seeds.iter().map(ToString::to_string).collect();
    let mut members = Members::new(config(), boot("me", 1, 5), seeds, 1);
    members.start(ms(0));
    effects(&mut members);
    members
}

fn effects(members: &mut Members) -> Vec<Effect> {
    std::iter::from_fn(|| members.poll_effect()).collect()
}

fn hear(members: &mut Members, updates: &[Member]) -> Vec<Effect> {
    members.handle_heard(ms(1), Heard { updates: updates.to_vec(), loads: Vec::new() });
    effects(members)
}

fn changed(records: &[Member]) -> Effect {
    Effect::Changed(Changed { members: records.to_vec(), forgotten: Vec::new() })
}

fn dials(effects: &[Effect]) -> Vec<(u64, Target, Ask)> {
    let dial = |effect: &Effect| match effect {
        Effect::Dial { id, to, ask } => Some((*id, to.clone(), ask.clone())),
        _ => None,
    };
    effects.iter().filter_map(dial).collect()
}

#[test]
fn a_start_announces_this_node_and_asks_every_seed_to_admit_it() {
    let seeds = vec!["a:1".to_string(), "b:1".to_string(), "a:1".to_string()];
    let me = boot("me", 1, 5);
    let mut members = Members::new(config(), me.clone(), seeds, 1);
    members.start(ms(0));
    let join = |id, seed: &str| Effect::Dial {
        id,
        to: Target::Seed(seed.into()),
        ask: Ask::Join { me: me.clone() },
    };
    assert_eq!(
        effects(&mut members),
        [changed(std::slice::from_ref(&me)), join(1, "a:1"), join(2, "b:1")]
    );
}

#[test]
fn an_accusation_is_refuted_by_the_next_incarnation_and_hearsay_is_not() {
    let me = boot("me", 1, 5);
    for state in [MemberState::Suspect, MemberState::Dead, MemberState::Left] {
        let mut members = members(&[]);
        let said = hear(&mut members, &[with(&me, 3, state)]);
        assert_eq!(said, [changed(&[with(&me, 4, MemberState::Alive)])]);
        assert_eq!(hear(&mut members, &[with(&me, 3, state)]), [], "that is refuted already");
        assert_eq!(hear(&mut members, &[boot("me", 2, 4)]), [], "an older boot is no news");
        assert_eq!(members.counters().refutations, 1);
    }
}

#[test]
fn a_newer_boot_of_the_name_stops_a_member_for_good() {
    let mut members = members(&[]);
    hear(&mut members, &[member("a", 10)]);
    let fenced = Effect::Fenced { by: Generation(6) };
    assert_eq!(hear(&mut members, &[boot("me", 2, 6)]), [fenced]);
    assert_eq!(hear(&mut members, &[member("b", 20)]), []);
    members.set_generation(ms(2), Generation(7));
    members.leave(ms(2));
    members.handle_timeout(ms(100_000));
    assert_eq!(effects(&mut members), []);
}

#[test]
fn two_boots_of_one_generation_are_told_apart_by_address_the_same_way_by_all() {
    let (low, high) = (boot("x", 10, 1), boot("x", 20, 1));
    for order in [[&low, &high], [&high, &low]] {
        let mut members = members(&[]);
        for record in order {
            hear(&mut members, std::slice::from_ref(record));
        }
        assert_eq!(members.table.get(&id("x")), Some(&high));
    }
}

#[test]
fn before_it_is_admitted_a_node_goes_above_what_the_mesh_remembers_of_it() {
    let mut members = members(&["seed:1"]);
    let too_low = |at_least| Effect::GenerationTooLow { at_least: Generation(at_least) };
    let answer = Answer::State { members: Vec::new(), highest: Some(Generation(8)) };
    let seed = member("seed", 10);
    members.handle_answer(ms(1), 1, Ok((sender(&seed), answer)));
    assert_eq!(effects(&mut members), [too_low(9)]);
    assert_eq!(hear(&mut members, &[boot("me", 1, 7)]), [], "that was asked for already");
    assert_eq!(hear(&mut members, &[boot("me", 1, 9)]), [too_low(10)]);
    members.set_generation(ms(2), Generation(10));
    let me = boot("me", 1, 10);
    let said = effects(&mut members);
    assert!(said.contains(&changed(std::slice::from_ref(&me))));
    assert_eq!(dials(&said), [(2, Target::Seed("seed:1".into()), Ask::Join { me: me.clone() })]);
    // The answer to the older request comes late and counts for nothing.
    let stale = Answer::State { members: Vec::new(), highest: Some(Generation(20)) };
    members.handle_answer(ms(3), 1, Ok((sender(&seed), stale)));
    assert_eq!(effects(&mut members), []);
}

#[test]
fn a_verdict_applies_only_to_the_record_that_was_probed() {
    let a = with(&member("a", 10), 2, MemberState::Alive);
    let verdict = |incarnation, state| Verdict {
        id: id("a"),
        generation: Generation(1),
        incarnation: Incarnation(incarnation),
        state,
    };
    let mut members = members(&[]);
    hear(&mut members, std::slice::from_ref(&a));
    members.handle_verdict(ms(2), &verdict(1, MemberState::Suspect));
    members.handle_verdict(ms(2), &verdict(3, MemberState::Suspect));
    assert_eq!(effects(&mut members), []);
    members.handle_verdict(ms(2), &verdict(2, MemberState::Suspect));
    let suspect = with(&a, 2, MemberState::Suspect);
    let event = MembershipEvent::Suspected { epoch: 3, member: suspect.clone() };
    assert_eq!(effects(&mut members), [Effect::Event(event), changed(&[suspect])]);
    // A refutation overtakes the end of the suspicion.
    hear(&mut members, &[with(&a, 3, MemberState::Alive)]);
    members.handle_verdict(ms(3), &verdict(2, MemberState::Dead));
    assert_eq!(effects(&mut members), []);
}

#[test]
fn a_newcomer_is_admitted_at_once_and_gets_the_whole_table() {
    let mut members = members(&[]);
    let (a, newcomer) = (member("a", 10), boot("new", 20, 3));
    let gone = with(&boot("gone", 40, 1), 0, MemberState::Dead);
    hear(&mut members, &[a.clone(), gone.clone()]);
    members.handle_ask(ms(2), 77, &sender(&newcomer), Ask::Join { me: newcomer.clone() });
    let table = vec![a, gone, boot("me", 1, 5), newcomer.clone()];
    let event = MembershipEvent::Joined { epoch: 3, member: newcomer.clone() };
    let answer = Answer::State { members: table, highest: None };
    assert_eq!(
        effects(&mut members),
        [Effect::Event(event), changed(&[newcomer]), Effect::Answer { id: 77, answer }]
    );
}

/// What a join of `newcomer` comes to where `known` is on record, when whoever is at the address on
/// record answers as `answered`.
fn join(known: &Member, newcomer: &Member, answered: Option<&Member>) -> Effect {
    let mut members = members(&[]);
    hear(&mut members, std::slice::from_ref(known));
    members.handle_ask(ms(2), 7, &sender(newcomer), Ask::Join { me: newcomer.clone() });
    let mut said = effects(&mut members);
    if let Some((id, to, ask)) = dials(&said).pop() {
        assert_eq!((to, ask), (Target::Addr(known.gossip), Ask::Ping));
        let answer = answered.map(|by| (sender(by), Answer::Pong)).ok_or(DialError::TimedOut);
        members.handle_answer(ms(3), id, answer);
        said = effects(&mut members);
    } else {
        assert_eq!(answered, None, "nobody was asked");
    }
    said.pop().unwrap()
}

#[test]
fn whose_name_it_is() {
    let refused = Effect::Answer { id: 7, answer: Answer::Refused { holder: addr(10) } };
    let too_low = |highest| Effect::Answer {
        id: 7,
        answer: Answer::State { members: Vec::new(), highest: Some(Generation(highest)) },
    };
    let admitted = |effect: Effect, highest: Option<u64>| {
        matches!(effect, Effect::Answer { answer: Answer::State { members, highest: h }, .. }
            if !members.is_empty() && h == highest.map(Generation))
    };
    let (holder, newcomer) = (boot("x", 10, 3), boot("x", 20, 4));
    let dead = with(&holder, 0, MemberState::Dead);
    let left = with(&holder, 0, MemberState::Left);

    assert_eq!(join(&holder, &newcomer, Some(&holder)), refused, "the holder lives");
    assert_eq!(join(&holder, &newcomer, Some(&boot("x", 10, 9))), refused, "a newer one does");
    assert!(admitted(join(&holder, &newcomer, None), Some(3)), "nobody answers there");
    assert!(admitted(join(&holder, &newcomer, Some(&member("y", 10))), Some(3)), "another does");
    assert!(admitted(join(&holder, &newcomer, Some(&newcomer)), Some(3)), "itself does");
    assert!(admitted(join(&dead, &newcomer, None), Some(3)), "the dead are not asked");
    assert!(admitted(join(&left, &newcomer, None), Some(3)), "nor those who left");
    assert!(admitted(join(&holder, &boot("x", 10, 4), None), Some(3)), "its own address: at once");

    let twin = boot("x", 20, 3);
    assert_eq!(
        join(&holder, &twin, Some(&holder)),
        refused,
        "two boots, one generation, one lives"
    );
    assert_eq!(join(&holder, &twin, None), too_low(3), "and if it is gone: above it");
    assert_eq!(join(&dead, &boot("x", 10, 2), None), too_low(3));
    assert_eq!(join(&left, &boot("x", 10, 3), None), too_low(3), "it said goodbye as this boot");
    assert!(admitted(join(&dead, &holder, None), None), "a boot that was only cut off");
}

#[test]
fn the_name_of_the_node_that_is_asked_is_taken_unless_it_asks_itself() {
    let mut members = members(&[]);
    let (me, other) = (boot("me", 1, 5), boot("me", 2, 6));
    members.handle_ask(ms(1), 1, &sender(&me), Ask::Join { me: me.clone() });
    let harmless = Answer::State { members: Vec::new(), highest: None };
    assert_eq!(effects(&mut members), [Effect::Answer { id: 1, answer: harmless }]);
    members.handle_ask(ms(1), 2, &sender(&other), Ask::Join { me: other.clone() });
    let refused = Answer::Refused { holder: addr(1) };
    assert_eq!(effects(&mut members), [Effect::Answer { id: 2, answer: refused }]);
    // A greeting and a record that differ are nobody's.
    members.handle_ask(ms(1), 3, &sender(&other), Ask::Join { me: member("a", 9) });
    assert_eq!(effects(&mut members), [Effect::Decline { id: 3 }]);
}

#[test]
fn state_too_big_for_a_datagram_travels_in_chunks_and_both_sides_end_with_the_union() {
    let many = |prefix: &str| -> Vec<Member> {
        (0..1_500).map(|i| member(&format!("{prefix}{i}"), 1_000 + i)).collect()
    };
    let mut left = members(&[]);
    let mut right = Members::new(config(), boot("you", 2, 1), Vec::new(), 2);
    right.start(ms(0));
    hear(&mut left, &many("l"));
    hear(&mut right, &many("r"));
    let asked = Ask::Sync { members: left.table().cloned().collect() };
    right.handle_ask(ms(1), 1, &sender(left.me()), asked);
    let Some(Effect::Answer { answer, .. }) = effects(&mut right).pop() else {
        panic!("an answer")
    };
    let frames = answer_frames(&answer);
    assert_eq!(frames.len(), 3_002_usize.div_ceil(STATE_CHUNK_MEMBERS_MAX) + 1);
    let mut reader = AnswerReader::default();
    let mut read = None;
    for frame in frames {
        assert!(encode_frame(&frame).unwrap().len() <= FRAME_BYTES_MAX);
        read = reader.frame(frame).unwrap();
    }
    let answered = (sender(right.me()), read.unwrap());
    left.dial(ms(1), Purpose::Sync, Target::Addr(addr(2)), Ask::Ping, DIAL_EXPIRY);
    let dial = left.next_dial;
    left.handle_answer(ms(2), dial, Ok(answered));
    assert_eq!(left.table().count(), 3_002);
    assert!(left.table().eq(right.table()));
}

#[test]
fn what_a_table_calls_dead_is_suspected_first_and_what_was_forgotten_stays_so() {
    let (a, long_dead) = (member("a", 10), with(&member("b", 20), 0, MemberState::Dead));
    let dead = with(&a, 0, MemberState::Dead);
    let mut members = members(&[]);
    hear(&mut members, std::slice::from_ref(&a));
    let state = Ask::Sync { members: vec![dead.clone(), long_dead.clone()] };
    members.handle_ask(ms(1), 1, &sender(&member("c", 30)), state.clone());
    assert_eq!(members.table.get(&id("a")).map(|m| m.state), Some(MemberState::Suspect));
    assert_eq!(members.table.get(&id("b")), Some(&long_dead), "a young node learns of the dead");
    // The news of a death is another thing.
    hear(&mut members, std::slice::from_ref(&dead));
    assert_eq!(members.table.get(&id("a")), Some(&dead));
    let (_, mut old) = (members, self::members(&[]));
    hear(&mut old, std::slice::from_ref(&a));
    for turn in 0..10 {
        old.handle_timeout(ms(10_000 * turn));
    }
    old.handle_ask(ms(100_000), 1, &sender(&member("c", 30)), state);
    assert_eq!(old.table.get(&id("b")), None, "an old one has no use for it");
}

#[test]
fn the_dead_are_redialled_with_growing_pauses_and_those_who_left_never() {
    let (a, b) = (member("a", 10), member("b", 20));
    let mut members = members(&[]);
    hear(&mut members, &[a.clone(), b.clone()]);
    hear(&mut members, &[with(&a, 0, MemberState::Dead), with(&b, 0, MemberState::Left)]);
    let mut pauses = Vec::new();
    let mut last = ms(1);
    while pauses.len() < 12 {
        let now = members.poll_timeout().unwrap();
        members.handle_timeout(now);
        for (dial, to, _) in dials(&effects(&mut members)) {
            assert_eq!(to, Target::Addr(addr(10)));
            pauses.push(now.saturating_since(last).as_millis());
            last = now;
            members.handle_answer(now, dial, Err(DialError::TimedOut));
        }
    }
    // Ten periods doubled up to a minute, give or take a half.
    let expected = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000];
    for (pause, expected) in pauses.iter().zip(expected) {
        assert!((expected / 2..=expected * 3 / 2).contains(pause), "{pauses:?}");
    }
}

#[test]
fn tombstones_are_kept_for_their_time_and_then_nothing_of_them_is() {
    let a = member("a", 10);
    let mut members = members(&[]);
    hear(&mut members, std::slice::from_ref(&a));
    hear(&mut members, &[with(&a, 0, MemberState::Left)]);
    let retention = config().tombstone_retention;
    members.handle_timeout(ms(0) + retention);
    assert!(members.table.get(&id("a")).is_some());
    effects(&mut members);
    members.handle_timeout(ms(1) + retention);
    let forgotten = Changed { members: Vec::new(), forgotten: vec![id("a")] };
    assert!(effects(&mut members).contains(&Effect::Changed(forgotten)));
    assert_eq!(members.table.get(&id("a")), None);
}

#[test]
fn loads_are_kept_of_present_members_and_news_of_them_is_told() {
    let mut members = members(&[]);
    let a = member("a", 10);
    hear(&mut members, std::slice::from_ref(&a));
    let report = |node: &str, version| LoadReport {
        node: id(node),
        generation: Generation(1),
        load: Load { version, queued: 4, ..Load::default() },
        age_ms: 0,
    };
    let heard = |loads| Heard { updates: Vec::new(), loads };
    let loads = vec![report("a", 1), report("nobody", 1), report("a", 1), report("me", 9)];
    members.handle_heard(ms(2), heard(loads));
    assert_eq!(effects(&mut members), [Effect::Load(report("a", 1))]);
    assert_eq!(members.loads().load_of(ms(2), &id("a")).map(|(load, _)| load.queued), Some(4));
    hear(&mut members, &[with(&a, 0, MemberState::Dead)]);
    assert_eq!(members.loads().load_of(ms(2), &id("a")), None);
}

#[test]
fn a_record_without_a_usable_address_is_nobodys() {
    let mut members = members(&[]);
    for gossip in ["0.0.0.0:7946", "[::]:7946", "10.0.0.1:0", "224.0.0.1:7946"] {
        let bad = Member { gossip: gossip.parse().unwrap(), ..member("a", 10) };
        assert_eq!(hear(&mut members, std::slice::from_ref(&bad)), []);
        members.handle_ask(ms(1), 1, &sender(&bad), Ask::Join { me: bad });
        assert_eq!(effects(&mut members), [Effect::Decline { id: 1 }]);
    }
    assert_eq!(members.counters().records_unusable, 8);
}

#[test]
fn after_a_departure_nothing_is_asked_or_answered() {
    let mut members = members(&["seed:1"]);
    hear(&mut members, &[member("a", 10)]);
    members.leave(ms(2));
    let left = with(&boot("me", 1, 5), 0, MemberState::Left);
    let event = MembershipEvent::Left { epoch: 3, member: left.clone() };
    assert_eq!(effects(&mut members), [Effect::Event(event), changed(&[left])]);
    members.handle_ask(ms(3), 1, &sender(&member("a", 10)), Ask::Ping);
    assert_eq!(effects(&mut members), [Effect::Decline { id: 1 }]);
    members.handle_answer(ms(3), 1, Err(DialError::TimedOut));
    members.handle_timeout(ms(100_000));
    assert_eq!(effects(&mut members), []);
    assert_eq!(members.poll_timeout(), None);
}

fn any_record() -> impl Strategy<Value = Member> {
    (0..4u8, 1..4u64, 0..3u32, 0..4u8, 0..2u16).prop_map(|(name, generation, inc, state, port)| {
        use MemberState::{Alive, Dead, Left, Suspect};
        Member {
            id: id(["a", "b", "c", "me"][usize::from(name)]),
            generation: Generation(generation),
            incarnation: Incarnation(inc),
            state: [Alive, Suspect, Dead, Left][usize::from(state)],
            gossip: addr(10 + port),
            steal: addr(1),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// The order in which news arrives, and how often, decides nothing.
    #[test]
    fn tables_that_heard_the_same_are_the_same(
        records in proptest::collection::vec(any_record(), 0..24),
        seed in 0..u64::MAX,
    ) {
        let mut shuffled = [records.clone(), records.clone()].concat();
        fastrand::Rng::with_seed(seed).shuffle(&mut shuffled);
        let (mut one, mut other) = (members(&[]), members(&[]));
        hear(&mut one, &records);
        for record in &shuffled {
            hear(&mut other, std::slice::from_ref(record));
        }
        let others = |m: &Members| m.table().filter(|r| r.id != id("me")).cloned().collect::<Vec<_>>();
        prop_assert_eq!(others(&one), others(&other));
    }

    /// Whatever is asked and answered, in whatever order: no panic, every request answered once or
    /// declined, and dials bounded.
    #[test]
    fn no_input_breaks_it(
        inputs in proptest::collection::vec((any_record(), any_record(), 0..8u8, 0..2_000u64), 0..80)
    ) {
        let mut members = members(&["seed:1"]);
        let mut now = ms(1);
        let (mut asked, mut answered) = (0_u64, 0_u64);
        for (one, other, kind, later) in inputs {
            now = now + Duration::from_millis(later);
            let records = vec![one.clone(), other.clone()];
            let highest = later.is_multiple_of(3).then_some(other.generation);
            match kind {
                0 => {
                    asked += 1;
                    members.handle_ask(now, asked, &sender(&one), Ask::Join { me: one.clone() });
                }
                1 => {
                    asked += 1;
                    members.handle_ask(now, asked, &sender(&one), Ask::Sync { members: records });
                }
                2 => {
                    let state = Answer::State { members: records, highest };
                    members.handle_answer(now, later % 9, Ok((sender(&one), state)));
                }
                3 => members.handle_answer(now, later % 9, Ok((sender(&one), Answer::Pong))),
                4 => members.handle_answer(now, later % 9, Err(DialError::Closed)),
                5 => members.handle_verdict(now, &Verdict {
                    id: one.id,
                    generation: one.generation,
                    incarnation: one.incarnation,
                    state: other.state,
                }),
                6 => members.handle_heard(now, Heard { updates: records, loads: Vec::new() }),
                _ => members.set_generation(now, other.generation),
            }
            members.handle_timeout(now);
            let done = |e: &Effect| matches!(e, Effect::Answer { .. } | Effect::Decline { .. });
            answered += effects(&mut members).iter().filter(|e| done(e)).count() as u64;
            prop_assert!(members.open_dials() <= DIALS_MAX);
        }
        members.handle_timeout(now + DIAL_EXPIRY);
        let done = |e: &Effect| matches!(e, Effect::Answer { .. } | Effect::Decline { .. });
        answered += effects(&mut members).iter().filter(|e| done(e)).count() as u64;
        prop_assert_eq!(asked, answered);
    }
}
