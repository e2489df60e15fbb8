use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::id::{FencingToken, Generation, JobId, NodeId, Owner};
use crate::job::Claim;
use crate::limits::{LEASES_MAX, ORPHANS_MAX};
use crate::time::Instant;

const fn at(ms: u64) -> Instant {
    Instant::from_micros(ms * 1_000)
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn owner(node: &str, generation: u64) -> Owner {
    Owner { node: NodeId::new(node).unwrap(), generation: Generation(generation) }
}

/// Term 15 s: valid for 14,235 ms, unchanged for 15,765 ms.
fn config() -> LeaseConfig {
    LeaseConfig::default()
}

#[test]
fn the_holder_counts_less_than_a_term_and_the_observer_more() {
    let config = config();
    assert_eq!((config.term(), config.period()), (ms(15_000), ms(5_000)));
    assert_eq!((config.valid(), config.unchanged()), (ms(14_235), ms(15_765)));
    let short = LeaseConfig::with_term(ms(3_000)).unwrap();
    assert_eq!((short.valid(), short.unchanged()), (ms(2_847), ms(3_153)));
}

#[test]
fn a_lease_that_leaves_the_holder_too_little_is_refused() {
    assert_eq!(LeaseConfig::with_term(ms(99)), Err(LeaseConfigError::Term(ms(99))));
    assert_eq!(LeaseConfig::with_term(Duration::MAX), Err(LeaseConfigError::Term(Duration::MAX)));
    assert!(LeaseConfig::new(ms(900), 0, ms(300)).is_ok());
    assert_eq!(
        LeaseConfig::new(ms(900), 0, ms(301)),
        Err(LeaseConfigError::TooLittleLeft { term: ms(900), valid: ms(599) })
    );
    assert_eq!(
        LeaseConfig::new(ms(1_000), u32::MAX, Duration::ZERO),
        Err(LeaseConfigError::TooLittleLeft { term: ms(1_000), valid: Duration::ZERO })
    );
}

mod keeper {
    use super::*;

    fn effects(keeper: &mut Keeper) -> Vec<KeeperEffect> {
        std::iter::from_fn(|| keeper.poll_effect()).collect()
    }

    fn renew(sent_ms: u64) -> KeeperEffect {
        KeeperEffect::Renew { sent_at: at(sent_ms) }
    }

    #[test]
    fn renews_every_third_and_counts_from_before_the_sending() {
        let mut keeper = Keeper::new(config(), at(1_000));
        assert_eq!(keeper.deadline(), at(15_235));
        assert_eq!(keeper.poll_timeout(), Some(at(6_000)));
        keeper.handle_timeout(at(5_999));
        assert_eq!(effects(&mut keeper), []);
        keeper.handle_timeout(at(6_000));
        assert_eq!(effects(&mut keeper), [renew(6_000)]);
        assert_eq!(keeper.poll_timeout(), Some(at(11_000)));
        keeper.handle_renewed(at(9_000), at(6_000), RenewOutcome::Renewed);
        assert_eq!(keeper.deadline(), at(20_235));
        assert!(keeper.is_valid(at(20_234)));
        assert!(!keeper.is_valid(at(20_235)));
    }

    #[test]
    fn late_and_repeated_answers_never_move_the_deadline_back() {
        let mut keeper = Keeper::new(config(), at(0));
        keeper.handle_timeout(at(5_000));
        keeper.handle_timeout(at(10_000));
        assert_eq!(effects(&mut keeper), [renew(5_000), renew(10_000)]);
        keeper.handle_renewed(at(10_100), at(10_000), RenewOutcome::Renewed);
        assert_eq!(keeper.deadline(), at(24_235));
        keeper.handle_renewed(at(10_200), at(5_000), RenewOutcome::Renewed);
        keeper.handle_renewed(at(10_200), at(10_000), RenewOutcome::Renewed);
        assert_eq!(keeper.deadline(), at(24_235));
        keeper.handle_renewed(at(10_300), at(999_000), RenewOutcome::Renewed);
        assert_eq!(keeper.deadline(), at(24_535), "nothing was sent in the future");
    }

    #[test]
    fn a_failed_renewal_is_tried_again_soon() {
        let mut keeper = Keeper::new(config(), at(0));
        keeper.handle_timeout(at(5_000));
        keeper.handle_renewed(at(5_500), at(5_000), RenewOutcome::Failed);
        assert_eq!(keeper.poll_timeout(), Some(at(6_500)));
        keeper.handle_timeout(at(6_500));
        assert_eq!(effects(&mut keeper), [renew(5_000), renew(6_500)]);
        keeper.handle_renewed(at(6_600), at(5_000), RenewOutcome::Failed);
        assert_eq!(keeper.poll_timeout(), Some(at(11_500)), "a later one is under way");
    }

    #[test]
    fn the_loss_is_told_once_and_is_final() {
        let lost = |reason| [KeeperEffect::Lost { reason }];
        let mut reaped = Keeper::new(config(), at(0));
        reaped.handle_timeout(at(5_000));
        reaped.handle_renewed(at(5_001), at(5_000), RenewOutcome::Lost);
        assert_eq!(effects(&mut reaped), lost(LossReason::Reaped), "a renewal is pointless now");
        assert!(!reaped.is_valid(at(5_001)));

        let mut expired = Keeper::new(config(), at(0));
        expired.handle_timeout(at(14_234));
        expired.handle_timeout(at(14_235));
        assert_eq!(effects(&mut expired), lost(LossReason::Expired));

        let mut late = Keeper::new(config(), at(0));
        late.handle_timeout(at(5_000));
        late.handle_renewed(at(14_235), at(5_000), RenewOutcome::Renewed);
        assert_eq!(effects(&mut late), lost(LossReason::Expired), "handlers have stopped by then");

        for mut keeper in [reaped, expired, late] {
            let deadline = keeper.deadline();
            keeper.handle_timeout(at(20_000));
            keeper.handle_renewed(at(20_000), at(20_000), RenewOutcome::Renewed);
            keeper.handle_renewed(at(20_000), at(20_000), RenewOutcome::Lost);
            keeper.handle_renewed(at(20_000), at(20_000), RenewOutcome::Failed);
            assert_eq!(effects(&mut keeper), []);
            assert_eq!((keeper.deadline(), keeper.poll_timeout()), (deadline, None));
            assert!(!keeper.is_valid(at(0)));
        }
    }
}

mod observer {
    use super::*;

    fn observer() -> Observer {
        let mut observer = Observer::new(config(), owner("me", 3), 1, at(0));
        observer.handle_timeout(at(0));
        assert_eq!(effects(&mut observer), [ObserverEffect::Scan]);
        observer
    }

    fn effects(observer: &mut Observer) -> Vec<ObserverEffect> {
        std::iter::from_fn(|| observer.poll_effect()).collect()
    }

    fn reap(node: &str, renewals: u64) -> ObserverEffect {
        ObserverEffect::Reap { owner: owner(node, 1), renewals }
    }

    #[test]
    fn reaps_what_stood_still_for_the_whole_time_and_nothing_else() {
        let mut observer = observer();
        observer.handle_leases(at(10), [(owner("dead", 1), 7), (owner("live", 1), 7)]);
        observer.handle_leases(at(5_000), [(owner("dead", 1), 7), (owner("live", 1), 8)]);
        observer.handle_leases(at(15_774), [(owner("dead", 1), 7), (owner("live", 1), 8)]);
        assert_eq!(effects(&mut observer), []);
        observer.handle_leases(at(15_775), [(owner("dead", 1), 7), (owner("live", 1), 8)]);
        assert_eq!(effects(&mut observer), [reap("dead", 7)]);
        observer.handle_leases(at(15_900), [(owner("dead", 1), 7), (owner("live", 1), 9)]);
        assert_eq!(effects(&mut observer), [], "the reaping is under way");
        observer.handle_reaped(at(16_000), &owner("dead", 1), ReapOutcome::Reaped);
        observer.handle_leases(at(31_000), [(owner("live", 1), 9)]);
        assert_eq!(effects(&mut observer), []);
    }

    #[test]
    fn looks_when_a_lease_may_be_due_but_not_without_pause() {
        let mut observer = observer();
        observer.handle_leases(at(10), [(owner("dead", 1), 7)]);
        let mut scans = Vec::new();
        while scans.last() < Some(&15_775) {
            let due = observer.poll_timeout().unwrap();
            observer.handle_timeout(due);
            assert_eq!(effects(&mut observer), [ObserverEffect::Scan]);
            scans.push(due.as_micros() / 1_000);
        }
        assert_eq!(scans.last(), Some(&15_775), "{scans:?}");
        assert!(scans.windows(2).all(|pair| (1_000..=5_000).contains(&(pair[1] - pair[0]))));
        // The answer to that scan is lost; the next comes after a pause, though the lease is due.
        assert_eq!(observer.poll_timeout(), Some(at(16_775)));
    }

    #[test]
    fn a_renewal_an_absence_or_another_boot_starts_the_count_again() {
        let mut observer = observer();
        observer.handle_leases(at(0), [(owner("a", 1), 7), (owner("b", 1), 7)]);
        observer.handle_leases(at(8_000), [(owner("a", 1), 8)]);
        observer.handle_leases(at(9_000), [(owner("a", 1), 8), (owner("b", 1), 7)]);
        observer.handle_leases(at(16_000), [(owner("a", 1), 8), (owner("b", 1), 7)]);
        observer.handle_leases(at(16_001), [(owner("a", 2), 0), (owner("b", 1), 7)]);
        assert_eq!(effects(&mut observer), []);
        observer.handle_leases(at(24_765), [(owner("a", 2), 0), (owner("b", 1), 7)]);
        assert_eq!(effects(&mut observer), [reap("b", 7)]);
    }

    #[test]
    fn a_listing_that_was_overtaken_is_no_renewal() {
        let mut observer = observer();
        observer.handle_leases(at(0), [(owner("a", 1), 8)]);
        observer.handle_leases(at(10), [(owner("a", 1), 7)]);
        observer.handle_leases(at(15_765), [(owner("a", 1), 8)]);
        assert_eq!(effects(&mut observer), [reap("a", 8)]);
    }

    #[test]
    fn a_reaping_that_failed_is_tried_again_and_one_that_came_late_is_not() {
        let mut observer = observer();
        let lease = [(owner("a", 1), 7)];
        observer.handle_leases(at(0), lease.clone());
        observer.handle_leases(at(16_000), lease.clone());
        assert_eq!(effects(&mut observer), [reap("a", 7)]);
        observer.handle_reaped(at(16_100), &owner("a", 1), ReapOutcome::Failed);
        observer.handle_leases(at(17_099), lease.clone());
        assert_eq!(effects(&mut observer), []);
        observer.handle_leases(at(17_100), lease.clone());
        assert_eq!(effects(&mut observer), [reap("a", 7)]);
        observer.handle_leases(at(22_100), lease.clone());
        assert_eq!(effects(&mut observer), [reap("a", 7)], "no answer in a third of the term");
        observer.handle_reaped(at(22_200), &owner("a", 1), ReapOutcome::Moved);
        observer.handle_leases(at(22_300), lease);
        assert_eq!(effects(&mut observer), [], "it is counted from the beginning");
    }

    #[test]
    fn gossip_makes_it_look_but_never_shortens_the_term() {
        let mut observer = observer();
        observer.handle_leases(at(10), [(owner("a", 1), 7)]);
        observer.handle_member_dead(at(20), &NodeId::new("a").unwrap());
        assert_eq!(effects(&mut observer), [], "it has just looked");
        assert_eq!(observer.poll_timeout(), Some(at(1_000)));
        observer.handle_timeout(at(1_000));
        assert_eq!(effects(&mut observer), [ObserverEffect::Scan]);
        observer.handle_leases(at(1_010), [(owner("a", 1), 7)]);
        assert_eq!(effects(&mut observer), []);
        observer.handle_member_dead(at(3_000), &NodeId::new("b").unwrap());
        assert_eq!(effects(&mut observer), [ObserverEffect::Scan], "at once");
        observer.handle_member_dead(at(4_500), &NodeId::new("me").unwrap());
        assert_eq!(effects(&mut observer), []);
    }

    #[test]
    fn it_never_reaps_itself_but_an_older_boot_of_its_own() {
        let mut observer = observer();
        let mine = |generation| (owner("me", generation), 5);
        observer.handle_leases(at(0), [mine(2), mine(3)]);
        observer.handle_leases(at(15_765), [mine(2), mine(3)]);
        let old = ObserverEffect::Reap { owner: owner("me", 2), renewals: 5 };
        assert_eq!(effects(&mut observer), [old]);
        observer.handle_registered(owner("me", 4));
        observer.handle_leases(at(16_000), [mine(3), mine(4)]);
        observer.handle_leases(at(31_765), [mine(3), mine(4)]);
        let old = ObserverEffect::Reap { owner: owner("me", 3), renewals: 5 };
        assert_eq!(effects(&mut observer), [old]);
    }

    #[test]
    fn observers_that_start_together_scan_apart() {
        let first_scan = |seed| {
            let mut observer = Observer::new(config(), owner("me", 1), seed, at(0));
            observer.handle_timeout(at(0));
            observer.poll_timeout().unwrap()
        };
        let scans: std::collections::HashSet<_> = (0..8).map(first_scan).collect();
        assert_eq!(scans.len(), 8);
        assert!(scans.iter().all(|scan| (at(3_750)..=at(5_000)).contains(scan)));
    }

    #[test]
    fn the_leases_it_follows_are_bounded() {
        let mut observer = observer();
        let lease = |i: usize| (owner(&format!("n{i:06}"), 1), 1);
        let listing = || (0..LEASES_MAX + 100).rev().map(lease);
        observer.handle_leases(at(0), listing());
        observer.handle_leases(at(16_000), listing());
        let reaped = effects(&mut observer);
        assert_eq!(reaped.len(), LEASES_MAX);
        assert_eq!(reaped[0], reap("n000000", 1));
    }
}

mod orphans {
    use super::*;

    fn claim(n: u16) -> Claim {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&n.to_be_bytes());
        Claim { job: JobId::from_bytes(bytes), token: FencingToken(1) }
    }

    fn effects(orphans: &mut Orphans) -> Vec<OrphansEffect> {
        std::iter::from_fn(|| orphans.poll_effect()).collect()
    }

    #[test]
    fn lists_once_a_term() {
        let mut orphans = Orphans::new(config(), at(0));
        assert_eq!(orphans.poll_timeout(), Some(at(15_000)));
        orphans.handle_timeout(at(14_999));
        assert_eq!(effects(&mut orphans), []);
        orphans.handle_timeout(at(15_000));
        assert_eq!(effects(&mut orphans), [OrphansEffect::List]);
        assert_eq!(orphans.poll_timeout(), Some(at(30_000)));
    }

    #[test]
    fn readopts_what_nobody_knew_twice_on_end() {
        let mut orphans = Orphans::new(config(), at(0));
        let known = |claim: &Claim| *claim == self::claim(1);
        orphans.handle_listed(at(15_000), [1, 2, 3].map(claim), known);
        assert_eq!(effects(&mut orphans), [], "an answer may be under way");
        orphans.handle_listed(at(30_000), [1, 3, 4].map(claim), known);
        let readopt =
            |n: &[u16]| [OrphansEffect::Readopt { claims: n.iter().map(|&n| claim(n)).collect() }];
        assert_eq!(effects(&mut orphans), readopt(&[3]));
        orphans.handle_listed(at(45_000), [2, 4].map(claim), known);
        assert_eq!(effects(&mut orphans), readopt(&[4]), "2 was away in between");
        orphans.handle_listed(at(60_000), [4].map(claim), known);
        assert_eq!(effects(&mut orphans), readopt(&[4]), "the readoption may have failed");
        let moved = Claim { token: FencingToken(2), ..claim(4) };
        orphans.handle_listed(at(75_000), [moved], known);
        assert_eq!(effects(&mut orphans), [], "another token is another claim");
    }

    #[test]
    fn two_listings_in_a_row_do_not_count_twice() {
        let mut orphans = Orphans::new(config(), at(0));
        orphans.handle_listed(at(30_000), [claim(1)], |_| false);
        orphans.handle_listed(at(37_499), [claim(1)], |_| false);
        assert_eq!(effects(&mut orphans), [], "the first answer was late");
        orphans.handle_listed(at(37_500), [claim(1)], |_| false);
        assert_eq!(effects(&mut orphans).len(), 1);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut orphans = Orphans::new(config(), at(0));
        let listing = || (0..u16::MAX).rev().map(claim);
        orphans.handle_listed(at(0), listing(), |_| false);
        orphans.handle_listed(at(15_000), listing(), |_| false);
        let [OrphansEffect::Readopt { claims }] = &effects(&mut orphans)[..] else {
            panic!("one readoption");
        };
        assert_eq!((claims.len(), claims[0]), (ORPHANS_MAX, claim(0)));
    }
}

/// A holder, an observer and the store between them, stepped by true time, which neither of them
/// sees.
struct World {
    rng: fastrand::Rng,
    now_us: u64,
    holder_clock_us: u64,
    observer_clock_us: u64,
    keeper: Keeper,
    observer: Observer,
    renewals: u64,
    reaped: bool,
    /// True time of arrival, and what arrives.
    mail: Vec<(u64, Mail)>,
    term_us: u64,
    renewals_get_through: bool,
}

#[derive(Clone, Copy)]
enum Mail {
    Renew(Instant),
    Renewed(Instant, RenewOutcome),
    Scan,
    Listed(Option<u64>),
    Reap(u64),
    Reaped(ReapOutcome),
}

/// Drift of the two clocks, in ppm: far more than real, so that 20 terms show what it does.
const DRIFT_PPM: u32 = 50_000;

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let config = LeaseConfig::new(ms(1_000), DRIFT_PPM, ms(20)).unwrap();
        let (holder_clock_us, observer_clock_us) = (rng.u64(..1 << 40), rng.u64(..1 << 40));
        let observer_seed = rng.u64(..);
        Self {
            rng,
            now_us: 0,
            holder_clock_us,
            observer_clock_us,
            keeper: Keeper::new(config, Instant::from_micros(holder_clock_us)),
            observer: Observer::new(
                config,
                owner("reaper", 1),
                observer_seed,
                Instant::from_micros(observer_clock_us),
            ),
            renewals: 0,
            reaped: false,
            mail: Vec::new(),
            term_us: 1_000_000,
            renewals_get_through: true,
        }
    }

    fn holder_now(&self) -> Instant {
        Instant::from_micros(self.holder_clock_us)
    }

    fn observer_now(&self) -> Instant {
        Instant::from_micros(self.observer_clock_us)
    }

    fn post(&mut self, mail: Mail) {
        let delay = match self.rng.u8(..10) {
            0 => return,
            1..4 => self.rng.u64(..self.term_us * 4 / 5),
            _ => self.rng.u64(..self.term_us / 50),
        };
        self.mail.push((self.now_us + delay, mail));
    }

    /// 4 ms of true time. `holder_ppm` is how much the holder's clock is slow, `observer_ppm` how
    /// much the observer's is fast.
    fn step(&mut self, holder_ppm: i64, observer_ppm: i64) -> Result<(), TestCaseError> {
        self.now_us += 4_000;
        self.holder_clock_us += 4_000_u64.saturating_add_signed(-4_000 * holder_ppm / 1_000_000);
        self.observer_clock_us += 4_000_u64.saturating_add_signed(4_000 * observer_ppm / 1_000_000);
        let (arrived, waiting) =
            std::mem::take(&mut self.mail).into_iter().partition(|(due, _)| *due <= self.now_us);
        self.mail = waiting;
        let mut arrived: Vec<(u64, Mail)> = arrived;
        self.rng.shuffle(&mut arrived);
        for (_, mail) in arrived {
            self.deliver(mail)?;
        }
        // Now and then a machine stalls, and its timers are late.
        if self.rng.u8(..4) > 0 {
            self.keeper.handle_timeout(self.holder_now());
        }
        if self.rng.u8(..4) > 0 {
            self.observer.handle_timeout(self.observer_now());
        }
        while let Some(effect) = self.keeper.poll_effect() {
            if let KeeperEffect::Renew { sent_at } = effect
                && self.renewals_get_through
            {
                self.post(Mail::Renew(sent_at));
            }
        }
        while let Some(effect) = self.observer.poll_effect() {
            match effect {
                ObserverEffect::Scan => self.post(Mail::Scan),
                ObserverEffect::Reap { renewals, .. } => self.post(Mail::Reap(renewals)),
            }
        }
        Ok(())
    }

    fn deliver(&mut self, mail: Mail) -> Result<(), TestCaseError> {
        let held = owner("holder", 1);
        match mail {
            Mail::Renew(sent_at) => {
                self.renewals += u64::from(!self.reaped);
                let outcome = if self.reaped { RenewOutcome::Lost } else { RenewOutcome::Renewed };
                let failed = self.rng.u8(..8) == 0;
                let outcome = if failed { RenewOutcome::Failed } else { outcome };
                self.post(Mail::Renewed(sent_at, outcome));
            }
            Mail::Renewed(sent_at, outcome) => {
                let before = self.keeper.deadline();
                self.keeper.handle_renewed(self.holder_now(), sent_at, outcome);
                prop_assert!(self.keeper.deadline() >= before);
            }
            Mail::Scan => {
                let listed = (!self.reaped).then_some(self.renewals);
                self.post(Mail::Listed(listed));
            }
            Mail::Listed(listed) => {
                let leases = listed.map(|renewals| (held, renewals));
                self.observer.handle_leases(self.observer_now(), leases);
            }
            Mail::Reap(renewals) => {
                let reaps = !self.reaped && self.renewals == renewals;
                if reaps {
                    prop_assert!(
                        !self.keeper.is_valid(self.holder_now()),
                        "reaped while the holder's lease was valid, at {} us",
                        self.now_us
                    );
                    self.reaped = true;
                }
                self.post(Mail::Reaped(if reaps {
                    ReapOutcome::Reaped
                } else {
                    ReapOutcome::Moved
                }));
            }
            Mail::Reaped(outcome) => {
                self.observer.handle_reaped(self.observer_now(), &held, outcome);
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_lease_is_reaped_while_its_holder_thinks_it_valid(
        seed: u64,
        // Half the bound each way, so that the two rates differ by no more than the bound.
        drifts in prop::collection::vec((-24_000_i64..=24_000, -24_000_i64..=24_000), 20),
    ) {
        for life in 0..20 {
            let mut world = World::new(seed.wrapping_add(life));
            for (holder_ppm, observer_ppm) in &drifts {
                for _ in 0..250 {
                    world.step(*holder_ppm, *observer_ppm)?;
                }
                if world.reaped {
                    break;
                }
            }
            // The holder dies, or is cut off: it is reaped in the end.
            world.renewals_get_through = false;
            for _ in 0..250 * 40 {
                if world.reaped {
                    break;
                }
                world.step(0, 0)?;
            }
            prop_assert!(world.reaped);
            prop_assert!(!world.keeper.is_valid(world.holder_now()));
        }
    }
}
