//! Several nodes: they find each other, share work, survive each other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use meshwork::actors::start::{Deaths, Slot};
use meshwork::actors::store::memory::MemoryStore;
use meshwork::actors::store::messages::{Leases, Reap, Register, StoreHandle};
use meshwork::prelude::*;
use meshwork::{Followed, JobEvent, JobState, MeshBuilder, MetricsSnapshot};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

#[derive(Serialize, Deserialize)]
struct Nap {
    ms: u64,
}

impl Job for Nap {
    const NAME: &'static str = "nap";
    type Output = String;
}

async fn nap(Nap { ms }: Nap, cx: JobContext) -> Result<String, JobError> {
    tokio::time::sleep(Duration::from_millis(ms)).await;
    Ok(cx.node().to_string())
}

/// A node with a short protocol period, so that tests are quick.
fn node(id: &str, store: &Store) -> MeshBuilder {
    Mesh::builder(id)
        .store(store.clone())
        .slots(2)
        .protocol_period(Duration::from_millis(100))
        .lease_term(Duration::from_secs(2))
        .job(nap)
}

/// A store in memory that the nodes of one test share.
fn shared_store() -> Store {
    Store::shared(memory_store())
}

fn memory_store() -> StoreHandle {
    let (deaths, _) = Deaths::new();
    let slot = Slot::<MemoryStore>::new("MemoryStore", 1_024);
    let handle = StoreHandle::of(&slot.addr());
    // It lives as long as the test's System: nobody stops it.
    std::mem::forget(slot.start(&actix::Arbiter::current(), &deaths, |_| MemoryStore::default()));
    handle
}

async fn start_all(ids: &[&str], store: &Store) -> Vec<Mesh> {
    start_each(ids.iter().map(|id| node(id, store)), ids.len()).await
}

async fn start_each(builders: impl Iterator<Item = MeshBuilder>, count: usize) -> Vec<Mesh> {
    let mut nodes: Vec<Mesh> = Vec::new();
    for builder in builders {
        let seeds = nodes.first().map(|seed| seed.gossip_addr().to_string());
        nodes.push(builder.seeds(seeds).start().await.unwrap());
    }
    for node in &nodes {
        all_see(node, count).await;
    }
    nodes
}

/// Waits until `node` sees `count` members present.
async fn all_see(node: &Mesh, count: usize) {
    let mut events = node.events();
    while node.members().present().count() != count {
        events.next().await.expect("the node lives");
    }
}

async fn drain_all(nodes: &[Mesh]) {
    for node in nodes {
        let report = node.drain(Duration::from_secs(10)).await;
        assert!(report.finished && report.retired, "{report:?}");
    }
}

fn naps(count: u64, ms: u64) -> Vec<meshwork::Request> {
    (0..count).map(|_| Enqueue::new(&Nap { ms }).into_request().unwrap()).collect()
}

/// The nodes that have run a job.
type Seen = Arc<watch::Sender<BTreeSet<String>>>;

/// Ends when all three nodes have begun one, however slow a node is to steal.
#[derive(Serialize, Deserialize)]
struct Meet;

impl Job for Meet {
    const NAME: &'static str = "meet";
    type Output = String;
}

async fn meet(_: Meet, seen: Data<Seen>, cx: JobContext) -> Result<String, JobError> {
    let me = cx.node().to_string();
    seen.send_modify(|seen| {
        seen.insert(me.clone());
    });
    let met = seen.subscribe().wait_for(|seen| seen.len() == 3).await.map(drop);
    tokio::time::sleep(Duration::from_millis(20)).await;
    met.map(|()| me).map_err(|_| JobError::permanent("the test is over"))
}

#[actix::test]
async fn idle_nodes_take_work_from_a_busy_one_and_every_job_has_one_outcome() {
    let store = shared_store();
    let seen = Seen::new(watch::Sender::new(BTreeSet::new()));
    let builders =
        ["a", "b", "c"].map(|id| node(id, &store).data(seen.clone()).job(meet)).into_iter();
    let nodes = start_each(builders, 3).await;
    let busy = &nodes[0];
    let mut events: Vec<_> = nodes.iter().map(|n| n.job_events(10_000)).collect();
    // Fewer than the buffer holds: nothing waits in the store, so the others must steal.
    let meetings = (0..60).map(|_| Enqueue::new(&Meet).into_request().unwrap()).collect();
    let accepted = busy.enqueue_batch(meetings).await.unwrap();
    let mut ran: BTreeMap<String, usize> = BTreeMap::new();
    for accepted in &accepted {
        let outcome = busy.outcome(&Ticket::<Meet>::of(accepted.id)).await;
        *ran.entry(outcome.succeeded().expect("all nodes meet")).or_default() += 1;
    }
    assert_eq!(ran.len(), 3, "all nodes worked: {ran:?}");
    let total = |count: fn(&MetricsSnapshot) -> u64| -> u64 {
        nodes.iter().map(|n| count(&n.metrics())).sum()
    };
    let stolen = total(|m| m.jobs_stolen_in);
    assert!(stolen >= 20, "{stolen} of 60 jobs were stolen");
    assert!(stolen <= 120, "{stolen} times a job was stolen: they are passed around");
    let counts = busy.counts().await.unwrap();
    assert_eq!((counts.of(JobState::Succeeded), counts.total()), (60, 60));
    drain_all(&nodes).await;
    let mut started = BTreeSet::new();
    for events in &mut events {
        while let Some(Followed::Event(event)) = events.next().await {
            if let JobEvent::Started { job, .. } = event {
                assert!(started.insert(job), "{job} ran twice");
            }
        }
    }
    assert_eq!(started.len(), 60);
}

#[actix::test]
async fn keyed_jobs_go_to_the_owner_of_their_key() {
    let store = shared_store();
    // No node looks into the store unless it is told to: who runs a job is then decided by its key.
    let mut nodes: Vec<Mesh> = Vec::new();
    for id in ["a", "b", "c"] {
        let seeds = nodes.first().map(|seed| seed.gossip_addr().to_string());
        let builder = node(id, &store).poll_interval(Duration::from_secs(600)).seeds(seeds);
        nodes.push(builder.start().await.unwrap());
    }
    for node in &nodes {
        all_see(node, 3).await;
    }
    for n in 0..30 {
        let key = format!("key-{n}");
        let owner = nodes[0].hash_ring().owner_of(&key).cloned().unwrap();
        let accepts = &nodes[n % 3];
        let enqueue = Enqueue::new(&Nap { ms: 0 }).key(&key).pinned();
        let ticket = accepts.enqueue(enqueue).await.unwrap();
        let ran_on = accepts.outcome(&ticket).await.succeeded().unwrap();
        assert_eq!(ran_on, owner.as_str(), "{key}");
    }
    drain_all(&nodes).await;
}

#[actix::test]
async fn a_node_id_of_a_live_node_is_refused_by_store_and_by_mesh() {
    let store = shared_store();
    let first = node("twin", &store).start().await.unwrap();
    let error = node("twin", &store).start().await.unwrap_err();
    assert!(matches!(&error, StartError::IdInUse { holder, .. } if *holder == first.gossip_addr()));
    // Another store knows nothing of it: the mesh does.
    let seed = first.gossip_addr().to_string();
    let error = node("twin", &shared_store()).seed(seed).start().await.unwrap_err();
    assert!(error.to_string().contains("node id `twin` is in use"), "{error}");
    // A node of another mesh on the same store has its name there too.
    let error = node("twin", &store).mesh_name("another").start().await.unwrap_err();
    assert!(matches!(error, StartError::IdInUse { .. }), "{error}");
    first.drain(Duration::from_secs(5)).await;
    let again = node("twin", &store).start().await.unwrap();
    assert!(again.generation() > first.generation());
    again.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_seed_that_is_down_is_reported_and_tried_again() {
    let store = shared_store();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let early = node("early", &store).seed(free.to_string()).start().await.unwrap();
    let joining = early.joining();
    assert!(!joining.joined);
    assert_eq!(joining.unreachable[0].0, free.to_string());
    let late = node("late", &store).bind(free.to_string()).start().await.unwrap();
    all_see(&early, 2).await;
    all_see(&late, 2).await;
    while !early.joining().joined {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drain_all(&[early, late]).await;
}

#[actix::test]
async fn events_are_a_snapshot_and_then_in_order() {
    let store = shared_store();
    let first = node("first", &store).start().await.unwrap();
    let mut events = first.events();
    let Some(MembershipEvent::Snapshot { epoch, members }) = events.next().await else {
        panic!("a snapshot comes first");
    };
    assert_eq!(members.len(), 1);
    let second =
        node("second", &store).seed(first.gossip_addr().to_string()).start().await.unwrap();
    let joined = next_event(&mut events).await;
    assert!(matches!(&joined, MembershipEvent::Joined { member, .. } if member.id == *second.id()));
    assert_eq!(joined.epoch(), epoch + 1);
    second.drain(Duration::from_secs(5)).await;
    let left = next_event(&mut events).await;
    assert!(matches!(&left, MembershipEvent::Left { .. }), "{left:?}");
    assert_eq!(left.epoch(), epoch + 2);
    first.drain(Duration::from_secs(5)).await;
    let own = next_event(&mut events).await;
    assert!(matches!(&own, MembershipEvent::Left { member, .. } if member.id == *first.id()));
    assert!(events.next().await.is_none(), "events end with the node");
}

async fn next_event(events: &mut (impl Stream<Item = MembershipEvent> + Unpin)) -> MembershipEvent {
    events.next().await.expect("the node lives")
}

#[actix::test]
async fn what_has_not_started_is_given_back_at_a_drain() {
    let store = shared_store();
    let nodes = start_all(&["leaver"], &store).await;
    let accepted = nodes[0].enqueue_batch(naps(20, 30)).await.unwrap();
    let report = nodes[0].drain(Duration::from_secs(5)).await;
    assert!(report.finished && report.released >= 10, "{report:?}");
    let heir = node("heir", &store).start().await.unwrap();
    for accepted in accepted {
        let outcome = heir.outcome(&Ticket::<Nap>::of(accepted.id)).await;
        assert!(matches!(outcome, Outcome::Succeeded(_)), "{outcome:?}");
    }
    heir.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_node_whose_lease_was_taken_starts_anew_and_every_job_is_done() {
    let handle = memory_store();
    let mesh = node("stalled", &Store::shared(handle.clone())).start().await.unwrap();
    let before = mesh.generation();
    let accepted = mesh.enqueue_batch(naps(40, 100)).await.unwrap();
    // What another node does when it saw the lease stand still for a term.
    let lease = handle.leases.send(Leases).await.unwrap().unwrap().remove(0);
    let reap = Reap { owner: lease.owner, renewals: lease.renewals };
    let reaped = handle.reap.send(reap).await.unwrap().unwrap().expect("it is reaped");
    assert_eq!(reaped.buffered.len() + reaped.interrupted.len(), 40 - done(&mesh).await);
    for accepted in accepted {
        let outcome = mesh.outcome(&Ticket::<Nap>::of(accepted.id)).await;
        assert!(matches!(outcome, Outcome::Succeeded(_)), "{outcome:?}");
    }
    assert!(mesh.generation() > before, "it registered again");
    assert_eq!(mesh.metrics().leases_lost, 1);
    drain_all(&[mesh]).await;
}

async fn done(mesh: &Mesh) -> usize {
    usize::try_from(mesh.counts().await.unwrap().of(JobState::Succeeded)).unwrap()
}

struct Slow {
    seen: tokio::sync::mpsc::UnboundedSender<MembershipEvent>,
    resume: watch::Receiver<bool>,
}

impl actix::Actor for Slow {
    type Context = actix::Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1);
    }
}

impl actix::Handler<MembershipChanged> for Slow {
    type Result = ();

    fn handle(&mut self, MembershipChanged(event): MembershipChanged, ctx: &mut Self::Context) {
        use actix::{ActorFutureExt, AsyncContext, WrapFuture};
        self.seen.send(event).unwrap();
        // It takes nothing more until it is told to.
        let mut resume = self.resume.clone();
        let wait = async move {
            resume.wait_for(|go| *go).await.unwrap();
        };
        ctx.wait(wait.into_actor(self).map(|(), _, _| ()));
    }
}

#[actix::test]
async fn a_subscriber_that_cannot_keep_up_gets_one_fresh_snapshot_and_slows_nobody() {
    use actix::Actor;
    let store = shared_store();
    let first = node("first", &store).start().await.unwrap();
    let (seen, mut events) = tokio::sync::mpsc::unbounded_channel();
    let (go, resume) = watch::channel(false);
    let slow = Slow { seen, resume }.start();
    first.membership().send(Subscribe::new(slow.recipient())).await.unwrap();
    let MembershipEvent::Snapshot { epoch, .. } = events.recv().await.unwrap() else {
        panic!("a snapshot comes first");
    };
    // Many more events than the slow one has room for; others see them all the same.
    for n in 0..4 {
        let id = format!("guest-{n}");
        let seed = first.gossip_addr().to_string();
        let guest = node(&id, &store).seed(seed).start().await.unwrap();
        all_see(&first, 2).await;
        guest.drain(Duration::from_secs(5)).await;
        all_see(&first, 1).await;
    }
    go.send(true).unwrap();
    let mut last = epoch;
    loop {
        let event = events.recv().await.unwrap();
        match &event {
            MembershipEvent::Snapshot { epoch, .. } => {
                assert!(*epoch > last, "a snapshot is fresh");
                assert!(*epoch - last > 1, "and stands for what was missed");
                break;
            }
            _ => assert_eq!(event.epoch(), last + 1, "in order until it fell behind"),
        }
        last = event.epoch();
    }
    first.drain(Duration::from_secs(5)).await;
}

#[actix::test]
async fn a_node_without_slots_enqueues_and_runs_nothing() {
    let store = shared_store();
    let front = node("front", &store).slots(0).start().await.unwrap();
    let seed = front.gossip_addr().to_string();
    // It does not steal, so what it runs it has claimed.
    let back = node("back", &store).seed(seed).stealing(false).start().await.unwrap();
    all_see(&front, 2).await;
    for enqueue in [Enqueue::new(&Nap { ms: 0 }), Enqueue::new(&Nap { ms: 0 }).pinned()] {
        let ticket = front.enqueue(enqueue).await.unwrap();
        assert_eq!(front.outcome(&ticket).await, Outcome::Succeeded("back".into()));
    }
    assert_eq!(front.metrics().jobs_started, 0);
    drain_all(&[front, back]).await;
}

#[derive(Serialize, Deserialize)]
struct Rare;

impl Job for Rare {
    const NAME: &'static str = "rare";
    type Output = u32;
}

async fn rare(_: Rare, cx: JobContext) -> Result<u32, JobError> {
    Ok(cx.attempt())
}

#[actix::test]
async fn a_job_that_reaches_a_node_without_its_handler_costs_no_attempt() {
    let store = shared_store();
    // It accepts the job, claims it, and cannot run it; the only node that can comes later.
    let without = node("without", &store).job_elsewhere::<Rare>().start().await.unwrap();
    let enqueue = Enqueue::new(&Rare).max_attempts(1);
    let ticket = without.enqueue(enqueue).await.unwrap();
    let seed = without.gossip_addr().to_string();
    let with = node("with", &store).job(rare).seed(seed).start().await.unwrap();
    assert_eq!(without.outcome(&ticket).await, Outcome::Succeeded(1));
    drain_all(&[without, with]).await;
}

#[actix::test]
async fn a_node_outlives_its_handle_and_a_drain_its_caller() {
    let store = shared_store();
    let first = node("first", &store).start().await.unwrap();
    let guest = node("guest", &store).seed(first.gossip_addr().to_string()).start().await.unwrap();
    all_see(&first, 2).await;
    let mut events = first.events();
    drop(guest);
    // Many periods pass, and nobody misses it.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(first.members().present().count(), 2);

    let accepted = first.enqueue_batch(naps(4, 300)).await.unwrap();
    let impatient =
        tokio::time::timeout(Duration::from_millis(50), first.drain(Duration::from_secs(10)));
    assert!(impatient.await.is_err(), "the naps take longer");
    let report = first.drain(Duration::ZERO).await;
    assert!(report.finished && report.retired, "the first limit counts: {report:?}");
    while events.next().await.is_some() {}
    drop(accepted);
}

#[actix::test]
async fn of_two_nodes_started_at_once_with_one_id_one_lives() {
    let store = shared_store();
    let both = [node("twin", &store).start(), node("twin", &store).start()];
    let (lives, refused): (Vec<_>, Vec<_>) =
        futures_util::future::join_all(both).await.into_iter().partition(Result::is_ok);
    assert!(matches!(refused[..], [Err(StartError::IdInUse { .. })]), "{refused:?}");
    for mesh in lives {
        drain_all(&[mesh.unwrap()]).await;
    }
}

#[actix::test]
async fn a_node_whose_name_a_newer_boot_has_taken_stops_and_takes_it_not_back() {
    let handle = memory_store();
    let mesh = node("frozen", &Store::shared(handle.clone())).start().await.unwrap();
    // It was frozen, and somebody started a replacement.
    let at_least = meshwork::Generation(1);
    let replacement = Register { node: mesh.id().clone(), at_least, gossip: None, over: None };
    let newer = handle.register.send(replacement).await.unwrap().unwrap().generation;
    assert_eq!(mesh.stopped().await, StopReason::Fenced { by: newer });
    let leases = handle.leases.send(Leases).await.unwrap().unwrap();
    assert_eq!(leases[0].owner.generation, newer, "the replacement keeps its lease");
}
