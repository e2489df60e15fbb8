//! Random conversations: the SQLite store answers as the memory store does, message by message, and
//! what both say obeys the rules of tokens and owners.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod store_common;

use std::collections::BTreeMap;
use std::time::Duration;

use actix::prelude::*;
use meshwork_actors::store::CrashRule;
use meshwork_actors::store::messages::*;
use meshwork_protocol::id::{Generation, JobId, Owner};
use meshwork_protocol::job::{Claim, ClaimedJob, Disposition, JobSpec, JobState};
use proptest::prelude::*;
use proptest::sample::select;

use store_common::*;

/// A message, or a turn of the clock. Nodes, jobs and tokens are few, so that they meet.
#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Insert(Insert),
    Claim(ClaimDue),
    Start(Start),
    Finish(Finish),
    Transfer(Transfer),
    Retake(Retake),
    Release(Release),
    Register(Register),
    Renew(Renew),
    Reap(Reap),
    Retire(Retire),
    ClaimsOf(ClaimsOf),
    Readopt(Readopt),
    Cancel(Cancel),
    LeaseOf(LeaseOf),
}

const JOBS: u64 = 12;

fn some_owner() -> impl Strategy<Value = Owner> {
    (select(vec!["a", "b", "c"]), prop_oneof![4 => Just(1), 2 => Just(2), 1 => Just(3)])
        .prop_map(|(name, generation)| owner(name, generation))
}

fn some_claim() -> impl Strategy<Value = Claim> {
    (0..JOBS, 0_u64..8).prop_map(|(n, token)| claim(n, token))
}

fn some_claims() -> impl Strategy<Value = Vec<Claim>> {
    proptest::collection::vec(some_claim(), 0..8)
}

fn some_aim() -> impl Strategy<Value = Aim> {
    prop_oneof![2 => Just(Aim::Wild), 5 => Just(Aim::True), 2 => Just(Aim::Stale)]
}

fn some_jobs() -> impl Strategy<Value = Vec<JobId>> {
    proptest::collection::vec((0..=JOBS).prop_map(id), 0..4)
}

fn some_job() -> impl Strategy<Value = NewJob> {
    (0..JOBS, -1_i16..2, select(vec![0, 0, 5, 20]), select(vec!["a", "b", "d"]), any::<bool>())
        .prop_map(|(n, priority, later_ms, affinity, claim)| {
            let run_at_ms = if later_ms == 0 { 0 } else { START_MS + later_ms };
            let spec = JobSpec { priority, run_at_ms, ..spec(n) };
            NewJob { claim, ..unclaimed(spec, affinity) }
        })
}

fn some_end() -> impl Strategy<Value = Disposition> {
    prop_oneof![
        1 => Just(Disposition::Succeeded("1".into())),
        1 => Just(Disposition::Dead("no".into())),
        3 => (0_u64..10).prop_map(|ms| Disposition::RetryAfter {
            delay: Duration::from_millis(ms),
            error: "io".into()
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0_u64..12).prop_map(Step::Wait),
        4 => (some_owner(), proptest::collection::vec(some_job(), 0..4))
            .prop_map(|(owner, jobs)| Step::Insert(Insert { owner, jobs })),
        4 => (some_owner(), 0_usize..4, any::<bool>())
            .prop_map(|(owner, max, own_only)| Step::Claim(ClaimDue { owner, max, own_only })),
        5 => (some_owner(), some_claims())
            .prop_map(|(owner, claims)| Step::Start(Start { owner, claims })),
        3 => (some_claims(), some_end()).prop_map(|(claims, disposition)| {
            let ended = |claim| Ended { claim, disposition: disposition.clone() };
            Step::Finish(Finish { ended: claims.into_iter().map(ended).collect() })
        }),
        3 => (some_owner(), some_owner(), some_claims(), some_jobs()).prop_map(
            |(from, to, claims, fetch)| Step::Transfer(Transfer { from, to, claims, fetch })
        ),
        2 => (some_owner(), some_claims())
            .prop_map(|(owner, claims)| Step::Retake(Retake { owner, claims })),
        1 => (some_owner(), some_claims())
            .prop_map(|(owner, claims)| Step::Release(Release { owner, claims, to: None })),
        3 => (select(vec!["a", "b", "c"]), 0_u64..3).prop_map(|(name, at_least)| {
            let at_least = Generation(at_least);
            Step::Register(Register { node: node(name), at_least, gossip: None, over: None })
        }),
        1 => some_owner().prop_map(|owner| Step::Renew(Renew { owner })),
        1 => (some_owner(), 0_u64..2)
            .prop_map(|(owner, renewals)| Step::Reap(Reap { owner, renewals })),
        1 => some_owner().prop_map(|owner| Step::Retire(Retire { owner })),
        1 => some_owner().prop_map(|owner| Step::ClaimsOf(ClaimsOf { owner })),
        1 => (some_owner(), some_claims())
            .prop_map(|(owner, claims)| Step::Readopt(Readopt { owner, claims })),
        1 => some_jobs().prop_map(|jobs| Step::Cancel(Cancel { jobs })),
        1 => select(vec!["a", "c", "d"]).prop_map(|name| Step::LeaseOf(LeaseOf { node: node(name) })),
    ]
}

/// The claims that an answer gives, and to whom.
type Given = Vec<(Claim, Owner)>;

/// The newest claim of each job, and whose it is or was.
type Newest = BTreeMap<JobId, (Claim, Owner)>;

/// How the claims of a step are chosen.
#[derive(Clone, Copy, Debug)]
enum Aim {
    /// At random.
    Wild,
    /// As they were given, with who got them. By chance alone hardly any job would come to its end.
    True,
    /// The same with an older token.
    Stale,
}

fn aim(step: Step, how: Aim, newest: &Newest) -> Step {
    let newest = match how {
        Aim::Wild => return step,
        Aim::True => newest.clone(),
        Aim::Stale => {
            let mut stale = newest.clone();
            for (claim, _) in stale.values_mut() {
                claim.token.0 = claim.token.0.saturating_sub(1);
            }
            stale
        }
    };
    let given = |claims: &[Claim]| {
        let jobs = claims.iter().filter_map(|claim| newest.get(&claim.job));
        let owner = jobs.clone().next()?.1.clone();
        Some((owner, jobs.map(|(claim, _)| *claim).collect::<Vec<_>>()))
    };
    match step {
        Step::Start(Start { owner, claims }) => {
            let (owner, claims) = given(&claims).unwrap_or((owner, claims));
            Step::Start(Start { owner, claims })
        }
        Step::Retake(Retake { owner, claims }) => {
            let (owner, claims) = given(&claims).unwrap_or((owner, claims));
            Step::Retake(Retake { owner, claims })
        }
        Step::Release(Release { owner, claims, .. }) => {
            let (owner, claims) = given(&claims).unwrap_or((owner, claims));
            Step::Release(Release { owner, claims, to: None })
        }
        Step::Readopt(Readopt { owner, claims }) => {
            let (owner, claims) = given(&claims).unwrap_or((owner, claims));
            Step::Readopt(Readopt { owner, claims })
        }
        Step::Transfer(m) => {
            let (from, claims) = given(&m.claims).unwrap_or((m.from, m.claims));
            Step::Transfer(Transfer { from, claims, ..m })
        }
        Step::Finish(mut m) => {
            for ended in &mut m.ended {
                if let Some((claim, _)) = newest.get(&ended.claim.job) {
                    ended.claim = *claim;
                }
            }
            Step::Finish(m)
        }
        step => step,
    }
}

fn given(claims: impl IntoIterator<Item = Claim>, owner: &Owner) -> Given {
    claims.into_iter().map(|claim| (claim, owner.clone())).collect()
}

/// Asks both stores, holds their answers against each other, and returns the claims that were given.
async fn take(model: &Subject, subject: &Subject, step: Step) -> Given {
    macro_rules! both {
        ($message:expr) => {{
            let message = $message;
            let expected = ask(&model.store, message.clone()).await;
            assert_eq!(ask(&subject.store, message.clone()).await, expected, "to {message:?}");
            expected
        }};
    }
    macro_rules! gives_nothing {
        ($message:expr) => {{
            let _ = both!($message);
            vec![]
        }};
    }
    match step {
        Step::Wait(ms) => {
            model.clock.advance(Duration::from_millis(ms));
            subject.clock.advance(Duration::from_millis(ms));
            vec![]
        }
        Step::Insert(m) => {
            let ids = m.jobs.iter().map(|job| job.spec.id);
            let inserted = both!(m.clone()).unwrap_or_default();
            let claimed = ids.zip(inserted).filter_map(|(job, inserted)| match inserted {
                Inserted::Claimed(token) => Some(Claim { job, token }),
                _ => None,
            });
            given(claimed, &m.owner)
        }
        Step::Claim(m) => given(both!(m.clone()).iter().flatten().map(ClaimedJob::claim), &m.owner),
        Step::Start(m) => gives_nothing!(m),
        Step::Finish(m) => gives_nothing!(m),
        Step::Transfer(m) => {
            given(both!(m.clone()).iter().flatten().map(|moved| moved.claim), &m.to)
        }
        Step::Retake(m) => given(both!(m.clone()).unwrap_or_default(), &m.owner),
        Step::Release(m) => gives_nothing!(m),
        Step::Register(m) => gives_nothing!(m),
        Step::Renew(m) => gives_nothing!(m),
        Step::Reap(m) => gives_nothing!(m),
        Step::Retire(m) => gives_nothing!(m),
        Step::ClaimsOf(m) => gives_nothing!(m),
        Step::Readopt(m) => {
            given(both!(m.clone()).iter().flatten().map(ClaimedJob::claim), &m.owner)
        }
        Step::Cancel(m) => gives_nothing!(m),
        Step::LeaseOf(m) => gives_nothing!(m),
    }
}

/// What a store says of itself as a whole.
async fn overview(t: &Subject) -> (Vec<JobRow>, Counts, Vec<LeaseRow>, Option<Duration>) {
    (
        ask(&t.store, Lookup { jobs: (0..JOBS).map(id).collect() }).await.unwrap(),
        ask(&t.store, CountJobs).await.unwrap(),
        ask(&t.store, Leases).await.unwrap(),
        ask(&t.store, NextDue).await.unwrap(),
    )
}

async fn converse(steps: Vec<(Step, Aim)>) {
    // One crash is forgiven, the second is not: both are met often.
    let crash_rule = CrashRule { crash_budget: 2 };
    let model = Subject::memory_with(crash_rule);
    let subject = Subject::sqlite_with(crash_rule);
    for t in [&model, &subject] {
        register(&t.store, ["a", "b"]).await;
    }
    let mut newest = Newest::new();
    for (step, how) in steps {
        let step = aim(step, how, &newest);
        for (claim, owner) in take(&model, &subject, step.clone()).await {
            let before = newest.insert(claim.job, (claim, owner));
            assert!(
                before.is_none_or(|(before, _)| before.token < claim.token),
                "{step:?} gave {claim:?} again"
            );
        }
        let seen = overview(&model).await;
        assert_eq!(overview(&subject).await, seen, "after {step:?}");
        one_owner_a_claim(&model, &seen.0, &seen.2).await;
    }
}

/// Each claimed job is in the list of one live owner, and of no other.
async fn one_owner_a_claim(t: &Subject, rows: &[JobRow], leases: &[LeaseRow]) {
    let mut listed = Vec::new();
    for lease in leases {
        let claims = ask(&t.store, ClaimsOf { owner: lease.owner.clone() }).await.unwrap();
        listed.extend(claims.into_iter().map(|claim| claim.job));
    }
    listed.sort_unstable();
    let claimed = rows.iter().filter(|row| row.state == JobState::Claimed).map(|row| row.id);
    assert_eq!(listed, claimed.collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn both_stores_answer_alike(steps in proptest::collection::vec((step(), some_aim()), 1..80)) {
        System::new().block_on(converse(steps));
    }
}
