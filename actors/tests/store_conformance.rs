//! One suite over every store: the same messages, the same answers.

#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod store_common;

use std::time::Duration;

use meshwork_actors::store::messages::*;
use meshwork_protocol::id::{FencingToken, Generation, Owner};
use meshwork_protocol::job::{Claim, Disposition, JobSpec, JobState, Recorded};

use store_common::*;

macro_rules! conformance {
    ($($test:ident),* $(,)?) => {
        mod memory {
            $(#[actix::test]
            async fn $test() {
                super::$test(super::Subject::memory()).await;
            })*
        }

        mod sqlite {
            $(#[actix::test]
            async fn $test() {
                super::$test(super::Subject::sqlite()).await;
            })*
        }
    };
}

conformance! {
    an_insert_sent_again_writes_nothing,
    one_duplicate_does_not_stop_the_others,
    a_job_is_inserted_claimed_only_when_asked_and_due,
    accepting_needs_no_lease_but_claiming_does,
    own_jobs_are_claimed_first_then_any_by_priority_then_age,
    a_claim_of_own_jobs_leaves_those_of_others,
    a_claim_returns_what_was_inserted,
    a_claim_takes_no_more_than_is_asked_for,
    a_claim_is_started_once,
    a_finish_needs_the_token_of_the_run,
    a_stale_owner_changes_nothing,
    a_transfer_moves_an_unstarted_claim_under_a_new_token,
    only_the_holder_of_the_right_token_gives_a_claim_away,
    a_late_transfer_after_a_retake_fails,
    a_retake_after_a_transfer_hits_no_row,
    a_thief_without_a_lease_gets_nothing,
    released_jobs_are_anyones_and_keep_their_age,
    a_lease_is_reaped_only_if_it_did_not_move,
    reaping_requeues_and_fences,
    a_third_crash_buries_the_job_that_was_running,
    buffered_jobs_are_never_charged,
    each_boot_has_a_greater_generation,
    of_two_boots_started_at_once_one_is_told_of_the_other,
    a_job_is_given_back_to_a_node,
    registering_reaps_the_older_boot,
    a_generation_that_cannot_be_stored_is_refused,
    leases_are_listed_until_they_end,
    retiring_requeues_without_a_charge,
    hidden_claims_are_listed_and_readopted,
    scheduled_jobs_become_due,
    failed_jobs_are_tried_again_at_their_time,
    what_waits_can_be_cancelled,
    lookups_tell_the_outcome,
    what_is_unknown_is_left_out,
    a_closed_store_has_answered_what_was_sent_before,
}

async fn an_insert_sent_again_writes_nothing(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    let jobs = vec![claimed(1, &a), unclaimed(spec(2), "a")];
    assert_eq!(
        insert(&t.store, &a, jobs.clone()).await,
        [Inserted::Claimed(FencingToken(1)), Inserted::Unclaimed]
    );
    assert_eq!(insert(&t.store, &a, jobs).await, [Inserted::Duplicate, Inserted::Duplicate]);
    assert_eq!(ask(&t.store, CountJobs).await.unwrap().total(), 2);
    assert_eq!(start(&t.store, &a, vec![claim(1, 1)]).await, [true], "the first claim stands");
}

async fn one_duplicate_does_not_stop_the_others(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, vec![unclaimed(spec(2), "a")]).await;
    let mut other = spec(2);
    other.arguments = "\"another\"".into();
    let jobs = vec![
        unclaimed(spec(1), "a"),
        unclaimed(other, "a"),
        unclaimed(spec(3), "a"),
        unclaimed(spec(3), "a"),
    ];
    assert_eq!(
        insert(&t.store, &a, jobs).await,
        [Inserted::Unclaimed, Inserted::Duplicate, Inserted::Unclaimed, Inserted::Duplicate]
    );
    let claimed = claim_due(&t.store, &a, 10).await;
    assert_eq!(brief(&claimed), [(id(2), 1, 1), (id(1), 1, 1), (id(3), 1, 1)]);
    assert_eq!(claimed[0].spec.arguments, spec(2).arguments, "the first one is kept");
}

async fn a_job_is_inserted_claimed_only_when_asked_and_due(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    let mut later = claimed(2, &a);
    later.spec = JobSpec { run_at_ms: START_MS + 1, ..spec(2) }.into();
    let mut now = claimed(3, &a);
    now.spec = JobSpec { run_at_ms: START_MS, ..spec(3) }.into();
    assert_eq!(
        insert(&t.store, &a, vec![claimed(1, &a), later, now, unclaimed(spec(4), "a")]).await,
        [
            Inserted::Claimed(FencingToken(1)),
            Inserted::Unclaimed,
            Inserted::Claimed(FencingToken(1)),
            Inserted::Unclaimed
        ]
    );
    assert_eq!(state(&t.store, 1).await, JobState::Claimed);
    assert_eq!(state(&t.store, 2).await, JobState::Scheduled);
    assert_eq!(state(&t.store, 3).await, JobState::Claimed);
    assert_eq!(state(&t.store, 4).await, JobState::Queued);
}

async fn accepting_needs_no_lease_but_claiming_does(t: Subject) {
    let stranger = owner("a", 1);
    assert_eq!(
        insert(&t.store, &stranger, vec![unclaimed(spec(1), "a")]).await,
        [Inserted::Unclaimed]
    );
    let jobs = vec![unclaimed(spec(2), "a"), claimed(3, &stranger)];
    assert_eq!(
        ask(&t.store, Insert { owner: stranger.clone(), jobs }).await,
        Err(StoreError::LeaseLost(stranger.clone()))
    );
    assert_eq!(ask(&t.store, CountJobs).await.unwrap().total(), 1, "all or none");
    let claim = ClaimDue { owner: stranger.clone(), max: 1, own_only: false };
    assert_eq!(ask(&t.store, claim).await, Err(StoreError::LeaseLost(stranger)));
}

async fn own_jobs_are_claimed_first_then_any_by_priority_then_age(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    let job = |n, priority, affinity| {
        let spec = JobSpec { priority, ..spec(n) };
        unclaimed(spec, affinity)
    };
    insert(&t.store, &a, vec![job(1, 0, "b"), job(2, 0, "a")]).await;
    t.clock.advance(Duration::from_millis(5));
    let jobs = vec![
        job(3, 7, "b"),
        job(4, 7, "a"),
        job(5, 0, "a"),
        job(6, -3, "a"),
        job(7, 0, "nobody"),
        job(8, i16::MAX, "b"),
        job(9, i16::MIN, "a"),
    ];
    insert(&t.store, &b, jobs).await;
    let first = claim_due(&t.store, &a, 6).await;
    assert_eq!(
        brief(&first),
        [4, 2, 5, 6, 9, 8].map(|n| (id(n), 1, 1)),
        "own ones by priority, then by age; then the best of the others"
    );
    let rest = claim_due(&t.store, &a, 100).await;
    assert_eq!(brief(&rest), [3, 1, 7].map(|n| (id(n), 1, 1)));
    assert_eq!(claim_due(&t.store, &b, 100).await, []);
}

async fn a_claim_of_own_jobs_leaves_those_of_others(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![unclaimed(spec(1), "b"), unclaimed(spec(2), "a")]).await;
    let own = ClaimDue { owner: a.clone(), max: 10, own_only: true };
    assert_eq!(brief(&ask(&t.store, own.clone()).await.unwrap()), [(id(2), 1, 1)]);
    assert_eq!(ask(&t.store, own).await.unwrap(), []);
    assert_eq!(brief(&claim_due(&t.store, &b, 10).await), [(id(1), 1, 1)]);
}

async fn a_claim_returns_what_was_inserted(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    let full = JobSpec {
        arguments: "{\"text\":\"ü\u{0}\\u0000 🦀\"}".into(),
        key: Some("tenant/42".into()),
        tenant: "acme".parse().unwrap(),
        priority: -7,
        run_at_ms: 1,
        max_attempts: u32::MAX,
        pinned: true,
        origin: node("elsewhere"),
        enqueued_ms: START_MS + 3,
        ..spec(1)
    };
    insert(&t.store, &a, vec![unclaimed(full.clone(), "a")]).await;
    let claimed = claim_due(&t.store, &a, 1).await;
    assert_eq!(*claimed[0].spec, full);
}

async fn a_claim_takes_no_more_than_is_asked_for(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, (0..5).map(|n| unclaimed(spec(n), "b")).collect()).await;
    assert_eq!(claim_due(&t.store, &a, 0).await, []);
    assert_eq!(brief(&claim_due(&t.store, &a, 2).await), [(id(0), 1, 1), (id(1), 1, 1)]);
    assert_eq!(claim_due(&t.store, &a, usize::MAX).await.len(), 3);
}

async fn a_claim_is_started_once(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, (1..=3).map(|n| claimed(n, &a)).collect()).await;
    assert_eq!(start(&t.store, &b, vec![claim(1, 1)]).await, [false], "not the owner");
    assert_eq!(
        start(&t.store, &a, vec![claim(1, 1), claim(2, 2), claim(9, 1), claim(1, 1)]).await,
        [true, false, false, false],
        "each claim by itself: held, wrong token, unknown job, started already"
    );
    assert_eq!(state(&t.store, 1).await, JobState::Running);
    assert_eq!(state(&t.store, 2).await, JobState::Claimed);
}

async fn a_finish_needs_the_token_of_the_run(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, vec![claimed(1, &a), claimed(2, &a)]).await;
    assert_eq!(finish(&t.store, vec![succeeded(1, 1)]).await, [false], "it was never started");
    start(&t.store, &a, vec![claim(1, 1), claim(2, 1)]).await;
    assert_eq!(
        finish(&t.store, vec![succeeded(1, 2), succeeded(1, 1), succeeded(1, 1), succeeded(2, 1)])
            .await,
        [false, true, false, true]
    );
    let row = &ask(&t.store, Lookup { jobs: vec![id(1)] }).await.unwrap()[0];
    assert_eq!(row.recorded, Some(Recorded::Succeeded("1".into())));
}

/// The write of an owner that was thought dead must not win over the one that took its place.
async fn a_stale_owner_changes_nothing(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    start(&t.store, &a, vec![claim(1, 1)]).await;
    ask(&t.store, Reap { owner: a.clone(), renewals: 0 }).await.unwrap().unwrap();
    let again = claim_due(&t.store, &b, 1).await;
    assert_eq!(brief(&again), [(id(1), 3, 2)], "requeued: 2, claimed: 3; one attempt is spent");
    start(&t.store, &b, vec![claim(1, 3)]).await;

    let buried = Ended { claim: claim(1, 1), disposition: Disposition::Dead("late".into()) };
    let delay = Duration::ZERO;
    let retried = Ended {
        claim: claim(1, 1),
        disposition: Disposition::RetryAfter { delay, error: "late".into() },
    };
    assert_eq!(
        finish(&t.store, vec![succeeded(1, 1), buried, retried, succeeded(1, 2)]).await,
        [false; 4]
    );
    assert_eq!(
        ask(&t.store, Release { owner: a.clone(), claims: vec![claim(1, 3)], to: None }).await,
        Ok(0)
    );
    assert_eq!(state(&t.store, 1).await, JobState::Running);
    assert_eq!(finish(&t.store, vec![succeeded(1, 3)]).await, [true]);
}

fn transfer(from: &Owner, to: &Owner, claims: Vec<Claim>) -> Transfer {
    Transfer { from: from.clone(), to: to.clone(), claims, fetch: vec![] }
}

async fn a_transfer_moves_an_unstarted_claim_under_a_new_token(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, (1..=3).map(|n| claimed(n, &a)).collect()).await;
    start(&t.store, &a, vec![claim(2, 1)]).await;
    let fetch = vec![id(3), id(2)];
    let claims = vec![claim(3, 1), claim(2, 1), claim(1, 1)];
    let moved = ask(&t.store, Transfer { fetch, ..transfer(&a, &b, claims) }).await.unwrap();
    assert_eq!(moved.len(), 2, "a running job stays");
    assert_eq!((moved[0].claim, moved[1].claim), (claim(3, 2), claim(1, 2)));
    let whole = moved[0].job.as_ref().unwrap();
    assert_eq!((&*whole.spec, whole.token.0, whole.attempt), (&spec(3), 2, 1));
    assert_eq!(moved[1].job, None, "not asked for");
    assert_eq!(start(&t.store, &a, vec![claim(1, 1), claim(1, 2)]).await, [false, false]);
    assert_eq!(start(&t.store, &b, vec![claim(1, 1), claim(1, 2)]).await, [false, true]);
}

async fn only_the_holder_of_the_right_token_gives_a_claim_away(t: Subject) {
    let [a, b, c] = register(&t.store, ["a", "b", "c"]).await;
    insert(&t.store, &a, vec![claimed(1, &a), unclaimed(spec(2), "a")]).await;
    for (from, claims) in [
        (&c, vec![claim(1, 1)]),
        (&owner("a", 2), vec![claim(1, 1)]),
        (&owner("nobody", 1), vec![claim(1, 1)]),
        (&a, vec![claim(1, 0), claim(1, 2), claim(1, u64::MAX), claim(2, 0), claim(7, 1)]),
    ] {
        assert_eq!(ask(&t.store, transfer(from, &b, claims)).await, Ok(vec![]));
    }
    assert_eq!(start(&t.store, &a, vec![claim(1, 1)]).await, [true], "nothing was changed");
}

async fn a_late_transfer_after_a_retake_fails(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    let retake = Retake { owner: a.clone(), claims: vec![claim(1, 1), claim(5, 1)] };
    assert_eq!(ask(&t.store, retake.clone()).await, Ok(vec![claim(1, 2)]));
    assert_eq!(ask(&t.store, transfer(&a, &b, vec![claim(1, 1)])).await, Ok(vec![]));
    assert_eq!(ask(&t.store, retake).await, Ok(vec![]), "nor does a second retake");
    assert_eq!(start(&t.store, &a, vec![claim(1, 1), claim(1, 2)]).await, [false, true]);
}

async fn a_retake_after_a_transfer_hits_no_row(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    let moved = ask(&t.store, transfer(&a, &b, vec![claim(1, 1)])).await.unwrap();
    assert_eq!(moved[0].claim, claim(1, 2));
    let retake = Retake { owner: a.clone(), claims: vec![claim(1, 1)] };
    assert_eq!(ask(&t.store, retake).await, Ok(vec![]));
    assert_eq!(
        ask(&t.store, transfer(&a, &b, vec![claim(1, 1)])).await,
        Ok(vec![]),
        "a transfer sent again moves nothing: the thief reads back what it holds"
    );
    assert_eq!(ask(&t.store, ClaimsOf { owner: b }).await, Ok(vec![claim(1, 2)]));
}

async fn a_thief_without_a_lease_gets_nothing(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    ask(&t.store, Reap { owner: b.clone(), renewals: 0 }).await.unwrap().unwrap();
    assert_eq!(
        ask(&t.store, transfer(&a, &b, vec![claim(1, 1)])).await,
        Err(StoreError::LeaseLost(b))
    );
    assert_eq!(start(&t.store, &a, vec![claim(1, 1)]).await, [true]);
}

async fn released_jobs_are_anyones_and_keep_their_age(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, (1..=3).map(|n| claimed(n, &a)).collect()).await;
    start(&t.store, &a, vec![claim(3, 1)]).await;
    t.clock.advance(Duration::from_secs(1));
    insert(&t.store, &a, vec![unclaimed(spec(4), "c")]).await;
    let release = |owner: &Owner, claims| Release { owner: owner.clone(), claims, to: None };
    assert_eq!(ask(&t.store, release(&b, vec![claim(1, 1)])).await, Ok(0), "not its own");
    let claims = vec![claim(2, 1), claim(1, 1), claim(3, 1), claim(1, 1)];
    assert_eq!(ask(&t.store, release(&a, claims)).await, Ok(2), "a running job stays");
    assert_eq!(
        brief(&claim_due(&t.store, &b, 10).await),
        [(id(1), 3, 1), (id(2), 3, 1), (id(4), 1, 1)],
        "older than what came since"
    );
}

async fn a_lease_is_reaped_only_if_it_did_not_move(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    ask(&t.store, Renew { owner: a.clone() }).await.unwrap();
    let reap = |owner: &Owner, renewals| Reap { owner: owner.clone(), renewals };
    assert_eq!(ask(&t.store, reap(&a, 0)).await, Ok(None), "it renewed since");
    assert_eq!(ask(&t.store, reap(&owner("a", 2), 1)).await, Ok(None), "another boot");
    assert_eq!(ask(&t.store, reap(&owner("b", 1), 0)).await, Ok(None), "unknown");
    assert_eq!(start(&t.store, &a, vec![]).await, [false; 0], "it lives");
    let reaped = Reaped { buffered: vec![id(1)], interrupted: vec![], dead: vec![] };
    assert_eq!(ask(&t.store, reap(&a, 1)).await, Ok(Some(reaped)));
    assert_eq!(ask(&t.store, reap(&a, 1)).await, Ok(None), "once");
}

async fn reaping_requeues_and_fences(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, (1..=4).map(|n| claimed(n, &a)).collect()).await;
    insert(&t.store, &b, vec![claimed(5, &b)]).await;
    start(&t.store, &a, vec![claim(2, 1), claim(3, 1), claim(4, 1)]).await;
    finish(&t.store, vec![succeeded(4, 1)]).await;
    assert_eq!(
        ask(&t.store, Reap { owner: a.clone(), renewals: 0 }).await,
        Ok(Some(Reaped { buffered: vec![id(1)], interrupted: vec![id(2), id(3)], dead: vec![] }))
    );

    let lost = || StoreError::LeaseLost(a.clone());
    let claims = vec![claim(1, 1)];
    let due = ClaimDue { owner: a.clone(), max: 1, own_only: false };
    assert_eq!(ask(&t.store, due).await, Err(lost()));
    let one = Start { owner: a.clone(), claims: claims.clone() };
    assert_eq!(ask(&t.store, one).await, Err(lost()));
    assert_eq!(ask(&t.store, transfer(&b, &a, vec![claim(5, 1)])).await, Err(lost()));
    let retake = Retake { owner: a.clone(), claims: claims.clone() };
    assert_eq!(ask(&t.store, retake).await, Err(lost()));
    let readopt = Readopt { owner: a.clone(), claims: claims.clone() };
    assert_eq!(ask(&t.store, readopt).await, Err(lost()));
    assert_eq!(ask(&t.store, Renew { owner: a.clone() }).await, Err(lost()));
    let insert = Insert { owner: a.clone(), jobs: vec![claimed(6, &a)] };
    assert_eq!(ask(&t.store, insert).await, Err(lost()));
    assert_eq!(ask(&t.store, transfer(&a, &b, claims)).await, Ok(vec![]));
    assert_eq!(finish(&t.store, vec![succeeded(2, 1)]).await, [false]);

    assert_eq!(
        brief(&claim_due(&t.store, &b, 10).await),
        [(id(1), 3, 1), (id(2), 3, 2), (id(3), 3, 2)],
        "only what ran has an attempt spent"
    );
    let rows = ask(&t.store, Lookup { jobs: vec![id(1), id(2), id(4)] }).await.unwrap();
    assert_eq!(rows[0].last_error, None);
    assert_eq!(rows[1].last_error.as_deref(), Some("interrupted by the crash of its node"));
    assert_eq!(rows[2].recorded, Some(Recorded::Succeeded("4".into())));
}

async fn a_third_crash_buries_the_job_that_was_running(t: Subject) {
    let [mut a] = register(&t.store, ["a"]).await;
    let mut job = claimed(1, &a);
    job.spec = JobSpec { max_attempts: 1, ..spec(1) }.into();
    insert(&t.store, &a, vec![job]).await;
    let mut token = 1;
    for crash in 1..=2 {
        assert_eq!(start(&t.store, &a, vec![claim(1, token)]).await, [true]);
        let at_least = Generation(0);
        let boot = Register { node: a.node.clone(), at_least, gossip: None, over: None };
        let registered = ask(&t.store, boot).await.unwrap();
        assert_eq!((registered.requeued, registered.dead), (vec![id(1)], vec![]));
        a.generation = registered.generation;
        token += 2;
        assert_eq!(brief(&claim_due(&t.store, &a, 1).await), [(id(1), token, crash + 1)]);
    }
    start(&t.store, &a, vec![claim(1, token)]).await;
    assert_eq!(
        ask(&t.store, Reap { owner: a.clone(), renewals: 0 }).await,
        Ok(Some(Reaped { buffered: vec![], interrupted: vec![], dead: vec![id(1)] }))
    );
    let row = &ask(&t.store, Lookup { jobs: vec![id(1)] }).await.unwrap()[0];
    assert_eq!(
        (row.state, row.recorded.clone()),
        (
            JobState::Dead,
            Some(Recorded::Dead {
                error: "interrupted by the crash of its node 3 times".into(),
                attempts: 3
            })
        )
    );
}

async fn buffered_jobs_are_never_charged(t: Subject) {
    let [mut a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    for _ in 0..5 {
        let at_least = Generation(0);
        let boot = Register { node: a.node.clone(), at_least, gossip: None, over: None };
        let registered = ask(&t.store, boot).await.unwrap();
        assert_eq!(registered.requeued, [id(1)]);
        a.generation = registered.generation;
        assert_eq!(claim_due(&t.store, &a, 1).await[0].attempt, 1);
    }
}

async fn each_boot_has_a_greater_generation(t: Subject) {
    let boot = |at_least| Register {
        node: node("a"),
        at_least: Generation(at_least),
        gossip: Some("[::1]:7946".parse().unwrap()),
        over: None,
    };
    for (at_least, generation) in [(0, 1), (0, 2), (2, 3), (90, 90), (90, 91), (5, 92)] {
        let registered = ask(&t.store, boot(at_least)).await.unwrap();
        let expected =
            Registered { generation: Generation(generation), requeued: vec![], dead: vec![] };
        assert_eq!(registered, expected);
    }
    let lease = LeaseRow {
        owner: owner("a", 92),
        renewals: 0,
        reaped: false,
        gossip: Some("[::1]:7946".parse().unwrap()),
    };
    assert_eq!(ask(&t.store, LeaseOf { node: node("a") }).await, Ok(Some(lease)));
}

async fn registering_reaps_the_older_boot(t: Subject) {
    let [a1] = register(&t.store, ["a"]).await;
    insert(&t.store, &a1, vec![claimed(1, &a1), claimed(2, &a1)]).await;
    start(&t.store, &a1, vec![claim(2, 1)]).await;
    ask(&t.store, Renew { owner: a1.clone() }).await.unwrap();
    let boot = Register { node: node("a"), at_least: Generation(0), gossip: None, over: None };
    assert_eq!(
        ask(&t.store, boot).await,
        Ok(Registered { generation: Generation(2), requeued: vec![id(1), id(2)], dead: vec![] })
    );
    assert_eq!(
        ask(&t.store, Renew { owner: a1.clone() }).await,
        Err(StoreError::LeaseLost(a1.clone()))
    );
    let claims = vec![claim(1, 1)];
    assert_eq!(
        ask(&t.store, Start { owner: a1.clone(), claims }).await,
        Err(StoreError::LeaseLost(a1.clone()))
    );
    let a2 = owner("a", 2);
    let claimed = claim_due(&t.store, &a2, 9).await;
    assert_eq!(brief(&claimed), [(id(1), 3, 1), (id(2), 3, 2)]);
    let claims = vec![claim(1, 3)];
    assert_eq!(
        ask(&t.store, Release { owner: a1.clone(), claims, to: None }).await,
        Ok(0),
        "an older boot of the same name holds nothing, whatever token it names"
    );
    assert_eq!(ask(&t.store, ClaimsOf { owner: a1 }).await, Ok(vec![]));
}

async fn a_generation_that_cannot_be_stored_is_refused(t: Subject) {
    let boot = |at_least| Register { node: node("a"), at_least, gossip: None, over: None };
    let refused = ask(&t.store, boot(Generation(u64::MAX))).await;
    assert!(matches!(refused, Err(StoreError::Unusable(_))), "{refused:?}");
    assert_eq!(ask(&t.store, LeaseOf { node: node("a") }).await, Ok(None));
    assert_eq!(ask(&t.store, boot(Generation(0))).await.unwrap().generation, Generation(1));
}

async fn leases_are_listed_until_they_end(t: Subject) {
    let [b, a, c] = register(&t.store, ["b", "a", "c"]).await;
    insert(&t.store, &a, vec![unclaimed(spec(1), "only-named")]).await;
    ask(&t.store, Renew { owner: b.clone() }).await.unwrap();
    ask(&t.store, Renew { owner: b.clone() }).await.unwrap();
    ask(&t.store, Retire { owner: c.clone() }).await.unwrap();
    let row = |owner: &Owner, renewals, reaped| LeaseRow {
        owner: owner.clone(),
        renewals,
        reaped,
        gossip: None,
    };
    assert_eq!(ask(&t.store, Leases).await, Ok(vec![row(&a, 0, false), row(&b, 2, false)]));
    assert_eq!(ask(&t.store, LeaseOf { node: c.node.clone() }).await, Ok(Some(row(&c, 0, true))));
    assert_eq!(ask(&t.store, LeaseOf { node: node("only-named") }).await, Ok(None));
    assert_eq!(ask(&t.store, LeaseOf { node: node("unknown") }).await, Ok(None));
}

async fn retiring_requeues_without_a_charge(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a), claimed(2, &a)]).await;
    start(&t.store, &a, vec![claim(2, 1)]).await;
    assert_eq!(ask(&t.store, Retire { owner: a.clone() }).await, Ok(2));
    assert_eq!(ask(&t.store, Retire { owner: a.clone() }).await, Ok(0), "once");
    assert_eq!(
        ask(&t.store, Renew { owner: a.clone() }).await,
        Err(StoreError::LeaseLost(a.clone()))
    );
    assert_eq!(ask(&t.store, Reap { owner: a, renewals: 0 }).await, Ok(None));
    assert_eq!(brief(&claim_due(&t.store, &b, 9).await), [(id(1), 3, 1), (id(2), 3, 2)]);
    let row = &ask(&t.store, Lookup { jobs: vec![id(2)] }).await.unwrap()[0];
    assert_eq!(row.last_error, None);
}

async fn hidden_claims_are_listed_and_readopted(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, (1..=3).map(|n| claimed(n, &a)).collect()).await;
    insert(&t.store, &b, vec![claimed(4, &b)]).await;
    start(&t.store, &a, vec![claim(3, 1)]).await;
    let listed = ask(&t.store, ClaimsOf { owner: a.clone() }).await.unwrap();
    assert_eq!(listed, [claim(1, 1), claim(2, 1)], "not those that run");
    ask(&t.store, transfer(&a, &b, vec![claim(1, 1)])).await.unwrap();
    let adopted = ask(&t.store, Readopt { owner: a.clone(), claims: listed }).await.unwrap();
    assert_eq!(brief(&adopted), [(id(2), 2, 1)], "one has moved since");
    assert_eq!(*adopted[0].spec, spec(2));
    assert_eq!(start(&t.store, &a, vec![claim(2, 1), claim(2, 2)]).await, [false, true]);
}

async fn scheduled_jobs_become_due(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    assert_eq!(ask(&t.store, NextDue).await, Ok(None));
    let at = |n, ms| unclaimed(JobSpec { run_at_ms: START_MS + ms, ..spec(n) }, "a");
    let never = unclaimed(JobSpec { run_at_ms: u64::MAX, ..spec(4) }, "a");
    insert(&t.store, &a, vec![at(1, 2_000), at(2, 1_000), never]).await;
    assert_eq!(ask(&t.store, NextDue).await, Ok(Some(Duration::from_secs(1))));
    t.clock.advance(Duration::from_millis(999));
    assert_eq!(claim_due(&t.store, &a, 9).await, []);
    insert(&t.store, &a, vec![unclaimed(spec(3), "a")]).await;
    t.clock.advance(Duration::from_millis(1_501));
    assert_eq!(ask(&t.store, NextDue).await, Ok(Some(Duration::ZERO)));
    assert_eq!(
        brief(&claim_due(&t.store, &a, 9).await),
        [(id(3), 1, 1), (id(2), 1, 1), (id(1), 1, 1)],
        "by the time they became due"
    );
    assert_eq!(state(&t.store, 4).await, JobState::Scheduled);
}

async fn failed_jobs_are_tried_again_at_their_time(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    start(&t.store, &a, vec![claim(1, 1)]).await;
    let disposition = Disposition::RetryAfter {
        delay: Duration::from_micros(10_001),
        error: "no route to host".into(),
    };
    assert_eq!(finish(&t.store, vec![Ended { claim: claim(1, 1), disposition }]).await, [true]);
    assert_eq!(
        ask(&t.store, Lookup { jobs: vec![id(1)] }).await,
        Ok(vec![JobRow {
            id: id(1),
            state: JobState::Failed,
            attempts: 1,
            recorded: None,
            last_error: Some("no route to host".into()),
        }])
    );
    assert_eq!(
        ask(&t.store, NextDue).await,
        Ok(Some(Duration::from_millis(11))),
        "never before its time"
    );
    t.clock.advance(Duration::from_millis(10));
    assert_eq!(claim_due(&t.store, &b, 1).await, []);
    t.clock.advance(Duration::from_millis(1));
    assert_eq!(brief(&claim_due(&t.store, &b, 1).await), [(id(1), 2, 2)]);
    start(&t.store, &b, vec![claim(1, 2)]).await;
    assert_eq!(finish(&t.store, vec![succeeded(1, 1), succeeded(1, 2)]).await, [false, true]);
    let row = &ask(&t.store, Lookup { jobs: vec![id(1)] }).await.unwrap()[0];
    assert_eq!((row.attempts, &row.last_error), (2, &None));
}

async fn what_waits_can_be_cancelled(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    let later = JobSpec { run_at_ms: START_MS + 1, ..spec(1) };
    let jobs = vec![
        unclaimed(later, "a"),
        unclaimed(spec(2), "a"),
        claimed(3, &a),
        claimed(4, &a),
        claimed(5, &a),
    ];
    insert(&t.store, &a, jobs).await;
    start(&t.store, &a, vec![claim(4, 1), claim(5, 1)]).await;
    let disposition = Disposition::RetryAfter { delay: Duration::MAX, error: "io".into() };
    finish(&t.store, vec![Ended { claim: claim(5, 1), disposition }]).await;
    let jobs: Vec<_> = (1..=6).map(id).collect();
    assert_eq!(
        ask(&t.store, Cancel { jobs: jobs.clone() }).await,
        Ok(vec![id(1), id(2), id(5)]),
        "a claimed and a running job stay"
    );
    assert_eq!(ask(&t.store, Cancel { jobs }).await, Ok(vec![]));
    t.clock.advance(Duration::from_secs(1));
    assert_eq!(claim_due(&t.store, &a, 9).await, []);
    assert_eq!(ask(&t.store, NextDue).await, Ok(None));
    let row = &ask(&t.store, Lookup { jobs: vec![id(5)] }).await.unwrap()[0];
    assert_eq!((&row.recorded, &row.last_error), (&Some(Recorded::Cancelled), &None));
}

async fn lookups_tell_the_outcome(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    insert(&t.store, &a, (1..=3).map(|n| claimed(n, &a)).collect()).await;
    insert(&t.store, &a, vec![unclaimed(spec(4), "a")]).await;
    start(&t.store, &a, vec![claim(1, 1), claim(2, 1)]).await;
    let dead = Ended { claim: claim(2, 1), disposition: Disposition::Dead("no such file".into()) };
    finish(&t.store, vec![succeeded(1, 1), dead]).await;
    let row = |n, state, attempts, recorded| JobRow {
        id: id(n),
        state,
        attempts,
        recorded,
        last_error: None,
    };
    let dead = Recorded::Dead { error: "no such file".into(), attempts: 1 };
    assert_eq!(
        ask(&t.store, Lookup { jobs: vec![id(4), id(2), id(1), id(3)] }).await,
        Ok(vec![
            row(4, JobState::Queued, 0, None),
            row(2, JobState::Dead, 1, Some(dead)),
            row(1, JobState::Succeeded, 1, Some(Recorded::Succeeded("1".into()))),
            row(3, JobState::Claimed, 0, None),
        ])
    );
    let mut counts = Counts::default();
    for state in [JobState::Queued, JobState::Dead, JobState::Succeeded, JobState::Claimed] {
        counts.set(state, 1);
    }
    assert_eq!(ask(&t.store, CountJobs).await, Ok(counts));
}

async fn what_is_unknown_is_left_out(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    assert_eq!(ask(&t.store, Lookup { jobs: vec![id(1)] }).await, Ok(vec![]));
    assert_eq!(ask(&t.store, Cancel { jobs: vec![id(1)] }).await, Ok(vec![]));
    assert_eq!(finish(&t.store, vec![succeeded(1, 1)]).await, [false]);
    assert_eq!(start(&t.store, &a, vec![claim(1, 1)]).await, [false]);
    assert_eq!(insert(&t.store, &a, vec![]).await, []);
    assert_eq!(ask(&t.store, ClaimsOf { owner: owner("nobody", 1) }).await, Ok(vec![]));
    assert_eq!(ask(&t.store, Retire { owner: owner("nobody", 1) }).await, Ok(0));
    let stranger = owner("nobody", 1);
    assert_eq!(
        ask(&t.store, Renew { owner: stranger.clone() }).await,
        Err(StoreError::LeaseLost(stranger))
    );
}

async fn a_closed_store_has_answered_what_was_sent_before(t: Subject) {
    let [a] = register(&t.store, ["a"]).await;
    let insert = t.store.insert.send(Insert { owner: a.clone(), jobs: vec![claimed(1, &a)] });
    let close = t.store.close.send(Close);
    let (inserted, closed) = futures_util::future::join(insert, close).await;
    assert_eq!(inserted.unwrap(), Ok(vec![Inserted::Claimed(FencingToken(1))]));
    assert_eq!(closed, Ok(()));
    let late = t.store.count.send(CountJobs).await;
    assert!(
        matches!(late, Err(actix::MailboxError::Closed) | Ok(Err(StoreError::Stopped))),
        "{late:?}"
    );
}

async fn of_two_boots_started_at_once_one_is_told_of_the_other(t: Subject) {
    let boot = |over| Register {
        node: node("a"),
        at_least: Generation(1),
        gossip: None,
        over: Some(Generation(over)),
    };
    assert_eq!(ask(&t.store, boot(0)).await.unwrap().generation, Generation(1));
    let taken = Err(StoreError::Taken(node("a"), Generation(1)));
    assert_eq!(ask(&t.store, boot(0)).await, taken, "both had read that there was none");
    assert_eq!(ask(&t.store, boot(1)).await.unwrap().generation, Generation(2));
}

async fn a_job_is_given_back_to_a_node(t: Subject) {
    let [a, b] = register(&t.store, ["a", "b"]).await;
    insert(&t.store, &a, vec![claimed(1, &a)]).await;
    let release = Release { owner: a.clone(), claims: vec![claim(1, 1)], to: Some(b.node.clone()) };
    assert_eq!(ask(&t.store, release).await, Ok(1));
    let own = |owner: &Owner| ClaimDue { owner: owner.clone(), max: 9, own_only: true };
    assert_eq!(ask(&t.store, own(&a)).await, Ok(vec![]), "it is not this node's any more");
    assert_eq!(ask(&t.store, own(&b)).await.unwrap().len(), 1);
}
