//! Membership proven on virtual time: scenarios over many seeds, each step held to the invariants.
//!
//! `MESHWORK_SEEDS=n` runs more seeds than the default; `MESHWORK_SEED=s` replays one.

use std::time::Duration;

use meshwork_protocol::id::{Generation, Incarnation, NodeId};
use meshwork_protocol::load::Load;
use meshwork_protocol::sim::invariants::converged;
use meshwork_protocol::sim::{End, Faults, HostIx, World, for_seeds};
use meshwork_protocol::swim::dissemination::send_limit;
use meshwork_protocol::swim::{MemberState, MembershipEvent, SwimConfig, suspicion};

const PERIOD: Duration = Duration::from_millis(100);

fn fast() -> SwimConfig {
    SwimConfig {
        protocol_period: PERIOD,
        sync_interval: Duration::from_secs(5),
        redial_interval_max: Duration::from_secs(5),
        ..SwimConfig::default()
    }
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).expect("a valid name")
}

/// A mesh in which everybody sees everybody.
fn settled(seed: u64, nodes: usize) -> World {
    let mut world = World::mesh(seed, fast(), Faults::none(), nodes);
    converge(&mut world, secs(10));
    // Young nodes exchange state often; let that be over.
    world.run_for(secs(3));
    world
}

fn converge(world: &mut World, limit: Duration) -> Duration {
    let took = world.run_until(limit, |world| converged(world).is_ok());
    took.unwrap_or_else(|| panic!("not converged in {limit:?}: {:?}", converged(world)))
}

/// The members that died, in `host`'s eyes.
fn deaths(world: &World, host: HostIx) -> Vec<NodeId> {
    let died = |event: &MembershipEvent| match event {
        MembershipEvent::Died { member, .. } => Some(member.id.clone()),
        _ => None,
    };
    world.hosts()[host].events.iter().filter_map(|(_, event)| died(event)).collect()
}

fn everybody_says(world: &World, of: &NodeId, state: MemberState) -> bool {
    let up = world.hosts().iter().filter(|host| host.machines.is_some() && host.id != *of);
    up.map(|host| host.state_of(of)).all(|seen| seen == Some(state))
}

/// The longest that a crash can stay unknown to anyone without other faults: some member's round
/// comes to it (twice a round's length between two probes, at worst), the probe lasts a period, the
/// suspicion its time, and the news as many periods as it is sent.
fn death_bound(config: &SwimConfig, nodes: usize) -> Duration {
    let period = config.protocol_period;
    let rounds = u32::try_from(2 * (nodes - 1)).expect("few nodes");
    let spread = send_limit(config.retransmit_multiplier, nodes);
    period * (rounds + 1 + spread) + suspicion::timeout(config.suspicion_multiplier, nodes, period)
}

#[test]
fn meshes_of_5_16_and_64_see_all_within_two_seconds() {
    for nodes in [5, 16, 64] {
        let mut times = Vec::new();
        for_seeds(8, |seed| {
            let mut world = World::mesh(seed, fast(), Faults::none(), nodes);
            times.push(converge(&mut world, secs(2)));
        });
        times.sort();
        println!(
            "{nodes} nodes see all after {:?} (median), {:?} (worst)",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}

#[test]
fn a_mesh_forms_over_a_network_that_loses_repeats_and_reorders() {
    for_seeds(8, |seed| {
        let mut world = World::mesh(seed, fast(), Faults::lossy(0.2), 16);
        let full = |world: &World| {
            let up = world.hosts().iter();
            up.map(|host| host.members().table().filter(|m| m.is_present()).count())
                .all(|seen| seen == 16)
        };
        let took = world.run_until(secs(5), full);
        assert!(took.is_some(), "not all see all: {:?}", converged(&world));
    });
}

#[test]
fn the_same_seed_is_the_same_run() {
    let run = |seed| {
        let mut world = World::mesh(seed, fast(), Faults::lossy(0.1), 8);
        world.run_for(secs(5));
        (world.digest(), world.datagrams())
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_crash_is_known_to_all_within_the_bound() {
    let mut periods = Vec::new();
    for nodes in [5, 16] {
        for_seeds(16, |seed| {
            let mut world = settled(seed, nodes);
            let victim = world.hosts()[2].id.clone();
            world.crash(2);
            let suspected = |world: &World| {
                world.hosts().iter().any(|h| h.state_of(&victim) == Some(MemberState::Suspect))
            };
            let first = world.run_until(death_bound(&fast(), nodes), suspected);
            let first = first.expect("somebody suspects it");
            periods.push(first.as_secs_f64() / PERIOD.as_secs_f64());
            let all = |world: &World| everybody_says(world, &victim, MemberState::Dead);
            let took = world.run_until(death_bound(&fast(), nodes), all);
            assert!(took.is_some(), "{nodes} nodes: {:?}", converged(&world));
            converge(&mut world, secs(1));
        });
    }
    // SWIM: e/(e-1) = 1.58 periods to the first probe, and one that the probe lasts, less the half
    // period by which a crash falls between two probes.
    let mean = periods.iter().sum::<f64>() / periods.len() as f64;
    println!("first suspicion after {mean:.2} periods on average");
    assert!(periods.len() < 16 || (1.2..3.2).contains(&mean), "{mean}");
}

#[test]
fn a_node_that_pauses_for_less_than_a_suspicion_refutes_and_is_alive_everywhere() {
    for_seeds(16, |seed| {
        let mut world = settled(seed, 8);
        let lasts = suspicion::timeout(4, 8, PERIOD);
        world.pause(3);
        let suspected = |w: &World| w.hosts()[0].state_of(&id("n3")) == Some(MemberState::Suspect);
        world.run_until(secs(10), suspected).expect("it is suspected");
        world.run_for(lasts / 4);
        world.resume(3);
        converge(&mut world, secs(5));
        assert!(world.hosts()[3].me().incarnation > Incarnation(0), "it refuted");
        for host in 0..8 {
            assert_eq!(deaths(&world, host), [], "nobody died in the eyes of n{host}");
        }
    });
}

#[test]
fn a_node_that_pauses_for_longer_than_a_suspicion_comes_back_as_the_same_boot() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 8);
        world.pause(3);
        let dead = |w: &World| everybody_says(w, &id("n3"), MemberState::Dead);
        // The paused node's own view is frozen: it knows nothing of its death.
        world.run_until(death_bound(&fast(), 8), dead).expect("it is dead to all others");
        world.resume(3);
        converge(&mut world, secs(10));
        assert_eq!(world.hosts()[3].me().generation, Generation(1));
    });
}

#[test]
fn a_stalled_node_does_not_accuse_the_healthy() {
    for_seeds(16, |seed| {
        let mut world = settled(seed, 8);
        // Round trips are long enough that a probe is often under way when the process stops.
        world.network.faults.delay = Duration::from_millis(15)..=Duration::from_millis(22);
        world.run_for(secs(1));
        for _ in 0..5 {
            world.pause(3);
            // Longer than a period, shorter than what makes the others suspect it for good.
            world.run_for(Duration::from_millis(250));
            world.resume(3);
            world.run_for(Duration::from_millis(50));
        }
        world.run_for(secs(2));
        converge(&mut world, secs(5));
        for host in 0..8 {
            let accused = world.hosts()[host].events.iter().any(|(_, event)| {
                matches!(event, MembershipEvent::Suspected { member, .. } if member.id != id("n3"))
            });
            assert!(!accused, "only the stalled node was ever suspected");
        }
    });
}

#[test]
fn a_bad_link_between_two_is_nobodys_death() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        // Datagrams and streams from n1 to n2 are lost, the other way is whole.
        world.cut(1, 2);
        world.run_for(secs(20));
        for host in 0..6 {
            assert_eq!(deaths(&world, host), []);
        }
        converge(&mut world, Duration::ZERO);
    });
}

#[test]
fn round_trips_of_two_thirds_of_a_period_accuse_nobody() {
    let ms = Duration::from_millis;
    for_seeds(4, |seed| {
        let wide = Faults { delay: ms(80)..=ms(160), ..Faults::none() };
        let mut world = World::mesh(seed, SwimConfig::default(), wide, 5);
        converge(&mut world, secs(10));
        world.run_for(secs(300));
        for host in world.hosts() {
            let accused =
                host.events.iter().any(|(_, e)| matches!(e, MembershipEvent::Suspected { .. }));
            assert!(!accused, "{:?}", host.events);
        }
    });
}

#[test]
fn every_load_is_known_to_all_and_young() {
    for nodes in [5, 64] {
        for_seeds(2, |seed| {
            let mut world = settled(seed, nodes);
            for turn in 1..=30 {
                for host in 0..nodes {
                    let load = Load { version: turn, queued: 7, ..Load::default() };
                    world.set_load(host, load);
                }
                world.run_for(PERIOD);
            }
            let mut ages = Vec::new();
            for host in world.hosts() {
                for other in world.hosts().iter().filter(|other| other.id != host.id) {
                    let (load, age) = host.load_of(world.now(), &other.id).expect("it is known");
                    assert_eq!(load.queued, 7);
                    ages.push(age);
                }
            }
            ages.sort();
            let (median, worst) = (ages[ages.len() / 2], ages[ages.len() - 1]);
            println!("{nodes} nodes: loads {median:?} old (median), {worst:?} (worst)");
            assert!(median <= PERIOD * 5, "{median:?}");
            assert!(worst <= PERIOD * 15, "{worst:?}");
        });
    }
}

/// Every datagram is lost with one chance in five, and takes up to 20 ms; a lost segment of a stream
/// comes 200 ms later. No death in ten minutes at the default period (1,200 rounds), nor in one
/// minute at a fifth of it (600 rounds), where a stream that lost a segment is always too late.
#[test]
fn twenty_percent_loss_kills_nobody() {
    for (config, time) in [(SwimConfig::default(), secs(600)), (fast(), secs(60))] {
        for_seeds(1, |seed| {
            let mut world = World::mesh(seed, config.clone(), Faults::none(), 8);
            converge(&mut world, secs(10));
            world.network.faults = Faults::lossy(0.2);
            world.run_for(time);
            for host in 0..8 {
                assert_eq!(deaths(&world, host), []);
            }
            world.calm();
            converge(&mut world, secs(10));
        });
    }
}

#[test]
fn a_node_restarts_under_its_name_before_its_death_is_known() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        world.crash(2);
        world.run_for(Duration::from_millis(150));
        world.start(2);
        converge(&mut world, secs(3));
        assert_eq!(world.hosts()[2].me().generation, Generation(2));
    });
}

#[test]
fn a_node_restarts_under_its_name_after_its_death_is_known() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        world.crash(2);
        let dead = |w: &World| everybody_says(w, &id("n2"), MemberState::Dead);
        world.run_until(death_bound(&fast(), 6), dead).expect("its death is known");
        world.start(2);
        converge(&mut world, secs(3));
    });
}

#[test]
fn same_name_new_address_is_admitted_at_once() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        world.crash(2);
        world.move_host(2);
        world.start(2);
        // The old address is asked once, for as long as a connection may take.
        converge(&mut world, secs(4));
        assert_eq!(world.hosts()[2].end, None);
    });
}

#[test]
fn a_boot_whose_store_forgot_its_generation_registers_above_what_the_mesh_knows() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        for _ in 0..3 {
            world.crash(2);
            world.run_for(secs(1));
            world.start(2);
            world.run_for(secs(1));
        }
        world.crash(2);
        let dead = |w: &World| everybody_says(w, &id("n2"), MemberState::Dead);
        world.run_until(death_bound(&fast(), 6), dead).expect("its death is known");
        world.forget_generations(2);
        world.start(2);
        assert_eq!(world.hosts()[2].me().generation, Generation(1));
        converge(&mut world, secs(3));
        assert_eq!(world.hosts()[2].me().generation, Generation(5), "four boots were known");
    });
}

#[test]
fn a_node_that_left_is_gone_at_once_and_the_same_id_may_come_again() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 8);
        world.leave(3);
        let left = |w: &World| everybody_says(w, &id("n3"), MemberState::Left);
        let took = world.run_until(secs(5), left).expect("everybody hears of the departure");
        assert!(took < PERIOD * send_limit(4, 8), "{took:?}: news travels in log time");
        world.crash(3);
        world.run_for(secs(20));
        for host in 0..8 {
            assert_eq!(deaths(&world, host), [], "a departure is no death");
        }
        world.start(3);
        converge(&mut world, secs(3));
    });
}

#[test]
fn a_healed_partition_becomes_one_mesh_again_without_help() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 9);
        // The seed is gone for good: all that the sides have is their memory of the dead.
        world.crash(0);
        let (left, right) = ([1, 2, 3], [4, 5, 6, 7, 8]);
        world.partition(&left, &right);
        let apart = |w: &World| {
            let present = |h: &HostIx| w.hosts()[*h].members().table().filter(|m| m.is_present());
            left.iter().all(|h| present(h).count() == 3)
                && right.iter().all(|h| present(h).count() == 5)
        };
        world.run_until(secs(20), apart).expect("each side buries the other");
        world.run_for(secs(60));
        let before: Vec<usize> = (0..9).map(|host| deaths(&world, host).len()).collect();
        world.network.unblock_all();
        converge(&mut world, secs(15));
        for (host, before) in before.iter().enumerate().skip(1) {
            let after = deaths(&world, host).len();
            assert_eq!(after, *before, "nobody is buried because the other side says so");
        }
    });
}

#[test]
fn a_mass_restart_leaves_nobody_dead() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 16);
        for host in 0..16 {
            world.crash(host);
        }
        for host in 0..16 {
            world.start(host);
            world.run_for(Duration::from_millis(20));
        }
        converge(&mut world, secs(5));
    });
}

#[test]
fn a_zombie_is_not_revived_by_the_table_of_one_who_slept() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 8);
        world.pause(5);
        world.crash(2);
        world.run_for(secs(10));
        for host in [0, 1, 3, 4, 6, 7] {
            let known = world.hosts()[host].events.len();
            assert_eq!(world.hosts()[host].state_of(&id("n2")), Some(MemberState::Dead), "{known}");
        }
        // It wakes believing that n2 lives, and exchanges its table with everybody.
        world.resume(5);
        let joined = |world: &World| -> usize {
            let others = world.hosts().iter().filter(|h| h.id != id("n5"));
            let events = others.flat_map(|h| h.events.iter());
            events
                .filter(|(_, e)| {
                    matches!(e, MembershipEvent::Joined { member, .. } if member.id == id("n2"))
                })
                .count()
        };
        let before = joined(&world);
        world.run_for(secs(30));
        assert_eq!(joined(&world), before, "nobody takes the dead for a newcomer");
        converge(&mut world, Duration::ZERO);
    });
}

#[test]
fn a_newcomer_with_the_name_of_a_live_node_is_refused() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 5);
        let holder = world.hosts()[3].addr;
        let newcomer = world.add("n3", &["10.0.0.1:7946"]);
        world.start(newcomer);
        world.run_for(secs(3));
        assert_eq!(world.hosts()[newcomer].end, Some(End::Refused(holder)));
        converge(&mut world, Duration::ZERO);
        assert_eq!(world.hosts()[3].me().generation, Generation(1), "the holder is untouched");
    });
}

#[test]
fn a_newcomer_with_the_name_of_its_own_seed_is_refused() {
    let mut world = settled(1, 3);
    let newcomer = world.add("n0", &["10.0.0.1:7946"]);
    world.start(newcomer);
    world.run_for(secs(3));
    assert_eq!(world.hosts()[newcomer].end, Some(End::Refused(world.hosts()[0].addr)));
    converge(&mut world, Duration::ZERO);
}

#[test]
fn of_two_live_boots_of_one_name_that_meet_the_older_stops() {
    for_seeds(8, |seed| {
        let mut world = settled(seed, 6);
        // n5's twin comes up on the other side of a partition, where n5 was thought dead.
        world.partition(&[0, 1, 2], &[3, 4, 5]);
        world.run_for(secs(10));
        let twin = world.add("n5", &["10.0.0.1:7946"]);
        world.partition(&[twin], &[3, 4, 5]);
        world.start(twin);
        world.run_for(secs(5));
        assert!(world.hosts()[twin].machines.is_some() && world.hosts()[5].machines.is_some());
        world.network.unblock_all();
        converge(&mut world, secs(15));
        assert_eq!(world.hosts()[5].end, Some(End::Fenced(Generation(2))));
        assert_eq!(world.hosts()[twin].end, None);
    });
}

#[test]
fn a_seed_that_is_down_is_reported_once_and_joined_when_it_comes_up() {
    for_seeds(8, |seed| {
        let mut world = World::new(seed, fast(), Faults::none());
        world.add("seed", &[]);
        world.add("a", &["10.0.0.1:7946", "nowhere.example:7946"]);
        world.start(1);
        world.run_for(secs(60));
        let mut down = world.hosts()[1].seeds_down.clone();
        down.sort();
        assert_eq!(down, ["10.0.0.1:7946", "nowhere.example:7946"], "each once");
        world.start(0);
        converge(&mut world, secs(10));
    });
}

#[test]
fn seeds_by_name_and_a_seed_that_is_oneself_are_fine() {
    for_seeds(4, |seed| {
        let mut world = World::new(seed, fast(), Faults::none());
        world.add("a", &["mesh.example:7946"]);
        world.add("b", &["mesh.example:7946", "10.0.0.2:7946"]);
        let addr = world.hosts()[0].addr;
        world.resolve("mesh.example:7946", addr);
        world.start(0);
        world.start(1);
        converge(&mut world, secs(3));
        world.run_for(secs(20));
        assert_eq!(world.hosts()[0].seeds_down, [""; 0]);
        assert_eq!(world.hosts()[1].seeds_down, [""; 0]);
        converge(&mut world, Duration::ZERO);
    });
}

#[test]
fn whatever_happens_tables_converge_once_it_stops() {
    for_seeds(24, |seed| {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed);
        let nodes = rng.usize(3..=9);
        let mut world = World::mesh(seed, fast(), Faults::lossy(rng.f64() * 0.3), nodes);
        world.allow_false_deaths();
        for _ in 0..rng.usize(5..40) {
            let host = rng.usize(0..nodes);
            let up = world.hosts()[host].machines.is_some();
            match rng.u32(0..9) {
                0 | 1 if up => world.crash(host),
                2 if up && !world.is_paused(host) => world.pause(host),
                3 if world.is_paused(host) => world.resume(host),
                4 => {
                    let other = rng.usize(0..nodes);
                    world.cut(host, other);
                }
                5 => {
                    let (left, right): (Vec<_>, Vec<_>) = (0..nodes).partition(|_| rng.bool());
                    world.partition(&left, &right);
                }
                6 => world.network.unblock_all(),
                7 if up && !world.is_paused(host) => world.leave(host),
                _ if !up => {
                    // The seed keeps its address: it is all that some have to find the others by.
                    if host != 0 && rng.u32(0..3) == 0 {
                        world.move_host(host);
                    }
                    world.start(host);
                }
                _ => {}
            }
            world.run_for(Duration::from_millis(rng.u64(0..2_000)));
        }
        world.calm();
        for host in 0..nodes {
            let it = &world.hosts()[host];
            if it.leaving {
                world.crash(host);
            }
            // Without its seed a newcomer has nobody to join by.
            if world.hosts()[host].machines.is_none() && (host == 0 || rng.bool()) {
                world.start(host);
            }
        }
        converge(&mut world, secs(60));
    });
}
