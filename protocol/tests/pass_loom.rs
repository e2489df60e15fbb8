//! The passes' protocol under a model checker: every order of the steps of a few threads, with a
//! thread killed before its first step, its second, and so on to its last.
//!
//! A step is one access to an atomic word, and a thread that is killed leaves the words as they are.
//! Arguments and replies are cells that the checker watches: two threads that could touch one at the
//! same time fail the model. A death is known to others through a join, where processes have the lock
//! that the kernel frees.

mod pass_heap;

use std::cell::Cell as StdCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use loom::cell::Cell;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread::{self, JoinHandle};
use meshwork_protocol::pass::atomic::AtomicWord;
use meshwork_protocol::pass::board::{Board, Recovered, Walker};
use meshwork_protocol::pass::frame::Call;
use meshwork_protocol::pass::ring::Claim;
use meshwork_protocol::pass::slot::{SlotState, SlotWord};
use meshwork_protocol::pass::{ClosureId, Priority, WorkerIndex};
use pass_heap::Heap;

loom::thread_local! {
    /// Steps that this thread has left to live; `None` for ever.
    static STEPS_LEFT: StdCell<Option<u32>> = StdCell::new(None);
}

/// What a thread's stack unwinds with when it is killed.
struct Killed;

/// A word that the checker watches, each access to which is a step.
struct Word {
    value: AtomicU64,
    /// Changed beside each access, so that the checker tries both orders of any two. By itself it
    /// remembers one access to a word, and a thread that reads before it writes hides from it that
    /// another read first (<https://github.com/tokio-rs/loom/issues/166>).
    order: AtomicU64,
}

impl Word {
    fn new(value: u64) -> Self {
        Self { value: AtomicU64::new(value), order: AtomicU64::new(0) }
    }

    fn step(&self) -> &AtomicU64 {
        STEPS_LEFT.with(|left| match left.get() {
            Some(0) => resume_unwind(Box::new(Killed)),
            steps => left.set(steps.map(|steps| steps - 1)),
        });
        self.order.fetch_or(0, Relaxed);
        &self.value
    }
}

impl AtomicWord for Word {
    fn load(&self, order: Ordering) -> u64 {
        self.step().load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.step().store(value, order);
    }

    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.step().compare_exchange(current, new, success, failure)
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.step().swap(value, order)
    }

    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.step().fetch_or(bits, order)
    }

    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.step().fetch_and(bits, order)
    }

    /// The checker takes `SeqCst` accesses for `AcqRel`.
    fn order_after_write() {
        fence(SeqCst);
    }
}

/// Before which of its steps a thread is killed, and whether it ever was.
#[derive(Clone)]
struct Fate {
    steps: u32,
    met: Arc<AtomicBool>,
}

impl Fate {
    /// Runs this until it ends or is killed; `None` if it was.
    fn befall<T>(&self, body: impl FnOnce() -> T) -> Option<T> {
        STEPS_LEFT.with(|left| left.set(Some(self.steps)));
        let end = catch_unwind(AssertUnwindSafe(body));
        STEPS_LEFT.with(|left| left.set(None));
        match end {
            Ok(value) => Some(value),
            Err(cause) if cause.is::<Killed>() => {
                self.met.store(true, Relaxed);
                None
            }
            Err(cause) => resume_unwind(cause),
        }
    }
}

/// Runs the model in every order, but for those in which threads are preempted more often than this.
/// How many orders there were.
fn in_every_order(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) -> usize {
    let orders = Arc::new(AtomicUsize::new(0));
    let count = orders.clone();
    let start = std::time::Instant::now();
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = preemptions;
    checker.max_branches = 10_000;
    checker.check(move || {
        count.fetch_add(1, Relaxed);
        model();
    });
    let orders = orders.load(Relaxed);
    println!("{orders} orders in {:?}", start.elapsed());
    orders
}

/// Runs the model in every order with a thread killed before each of its steps, until there is no
/// order left in which it is.
fn killed_at_every_step(
    preemptions: Option<usize>,
    model: impl Fn(&Fate) + Clone + Send + Sync + 'static,
) {
    let mut orders = 0;
    for steps in 0.. {
        let fate = Fate { steps, met: Arc::default() };
        let (model, its_fate) = (model.clone(), fate.clone());
        orders += in_every_order(preemptions, move || model(&its_fate));
        if !fate.met.load(Relaxed) {
            assert!(steps > 1, "nothing was ever killed");
            println!("killed before each of {steps} steps, {orders} orders in all");
            return;
        }
    }
}

const FIRST: WorkerIndex = WorkerIndex(1);
const SECOND: WorkerIndex = WorkerIndex(2);
/// Cleans up when all threads of a model have ended.
const LAST: WorkerIndex = WorkerIndex(3);

const RED: ClosureId = ClosureId(1);
const BLUE: ClosureId = ClosureId(2);

/// What a reply is over its argument.
const REPLY: u64 = 100;
const POISON: u64 = 999;

fn call(closure: ClosureId) -> Call {
    Call { closure, bytes: 8, attempts: 3, priority: Priority::High, timed: false }
}

fn anything(_: ClosureId) -> bool {
    true
}

/// Slots with what is in them, and the words of the one client that owns them.
struct Host {
    heap: Heap<Word>,
    arguments: Vec<Cell<u64>>,
    replies: Vec<Cell<u64>>,
    completions: Word,
    sleeping: Word,
}

impl Host {
    fn new(slots: u32, cells: usize) -> Rc<Self> {
        let word = Word::new;
        Rc::new(Self {
            heap: Heap::new(slots, cells, 0, word),
            arguments: (0..slots).map(|_| Cell::new(0)).collect(),
            replies: (0..slots).map(|_| Cell::new(0)).collect(),
            completions: word(0),
            sleeping: word(0),
        })
    }

    fn board(&self) -> Board<'_, Heap<Word>> {
        self.heap.board()
    }

    fn all(&self) -> std::ops::Range<u32> {
        0..self.arguments.len() as u32
    }

    fn submit(&self, slot: u32, argument: u64) -> SlotWord {
        self.submit_call(slot, argument, call(RED))
    }

    fn submit_call(&self, slot: u32, argument: u64, call: Call) -> SlotWord {
        self.arguments[slot as usize].set(argument);
        self.heap.submit(slot, call)
    }

    /// Runs a claimed pass. Its argument, and whether its client is to be woken.
    fn run(&self, claim: Claim) -> (u64, bool) {
        let argument = self.arguments[claim.slot as usize].get();
        self.replies[claim.slot as usize].set(argument + REPLY);
        assert!(self.board().complete(claim), "a living worker was robbed");
        (argument, self.tell(claim.slot))
    }

    fn tell(&self, slot: u32) -> bool {
        self.board().announce(&self.completions, 1 << slot, &self.sleeping)
    }

    /// Runs the next hinted pass. Its argument.
    fn work(&self, walker: &mut Walker, worker: WorkerIndex) -> Option<u64> {
        let claim = self.board().claim(walker, worker, anything)?;
        Some(self.run(claim).0)
    }

    /// Runs what is hinted, in the order in which it is found.
    fn work_off(&self, worker: WorkerIndex) -> Vec<u64> {
        let mut walker = Walker::default();
        std::iter::from_fn(|| self.work(&mut walker, worker)).collect()
    }

    /// Runs what waits, hinted or not.
    fn work_off_unhinted(&self, worker: WorkerIndex) -> Vec<u64> {
        let mut walker = Walker::default();
        std::iter::from_fn(|| {
            let claim = self.board().scan(self.all(), &mut walker, worker, anything)?;
            Some(self.run(claim).0)
        })
        .collect()
    }

    fn recover(&self, dead: WorkerIndex) -> Recovered {
        self.board().recover(
            dead,
            |slot| self.replies[slot as usize].set(POISON),
            |slot| {
                self.tell(slot);
            },
        )
    }

    /// Collects what the client was told of. The replies, by slot.
    fn collect(&self) -> Vec<(u32, u64)> {
        if self.completions.load(SeqCst) == 0 {
            return Vec::new();
        }
        let told = self.completions.swap(0, SeqCst);
        let told = self.all().filter(|slot| told >> slot & 1 == 1);
        told.filter_map(|slot| {
            let done = self.board().done(slot)?;
            let reply = self.replies[slot as usize].get();
            self.board().collect(slot, done).expect("it is done");
            Some((slot, reply))
        })
        .collect()
    }

    /// Goes on where no other thread is left, on words that nobody watches: it is much faster.
    fn still_works(&self) {
        let words =
            self.heap.map(|word| std::sync::atomic::AtomicU64::new(word.value.load(Relaxed)));
        words.assert_works(call(RED));
    }
}

/// Starts a thread of a process.
fn spawn<T: 'static>(host: &Rc<Host>, body: impl FnOnce(&Host) -> T + 'static) -> JoinHandle<T> {
    let host = host.clone();
    thread::spawn(move || body(&host))
}

fn end<T>(thread: JoinHandle<T>) -> T {
    thread.join().expect("a thread that fails fails the model")
}

#[test]
fn the_checker_tries_a_write_before_another_threads_read() {
    let read = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
    let its_read = read.clone();
    in_every_order(None, move || {
        let host = Host::new(1, 2);
        let writer = spawn(&host, |host| {
            let ready = host.heap.state(0).ready().expect("the slot is free");
            host.heap.words[0].store(ready.bits(), SeqCst);
        });
        its_read[usize::from(host.heap.state(0).is_ready())].store(true, Relaxed);
        end(writer);
    });
    assert!(read.iter().all(|seen| seen.load(Relaxed)));
}

#[test]
fn one_of_two_workers_claims_a_pass_and_sees_its_call() {
    in_every_order(Some(3), || {
        let host = Host::new(1, 2);
        let first = spawn(&host, |host| host.work(&mut Walker::default(), FIRST));
        let second = spawn(&host, |host| host.work(&mut Walker::default(), SECOND));
        host.submit(0, 5);
        let mut ran: Vec<u64> = end(first).into_iter().chain(end(second)).collect();
        ran.extend(host.work_off(LAST));
        assert_eq!(ran, [5]);
        assert_eq!(host.collect(), [(0, 5 + REPLY)]);
        host.still_works();
    });
}

#[test]
fn a_submitter_killed_at_any_step_is_in_nobodys_way() {
    killed_at_every_step(Some(2), |fate| {
        let host = Host::new(2, 4);
        let fate = fate.clone();
        let killed = spawn(&host, move |host| {
            fate.befall(|| host.submit(0, 5));
        });
        let other = spawn(&host, |host| {
            host.submit(1, 6);
        });
        let mut walker = Walker::default();
        let mut ran: Vec<u64> = (0..2).filter_map(|_| host.work(&mut walker, FIRST)).collect();
        end(killed);
        end(other);
        ran.extend(host.work_off(SECOND));
        assert!(ran.contains(&6), "the other's pass waits");
        // What waits now was made ready and not hinted, and is hinted by the watchdog.
        let unhinted = host.heap.state(0).is_ready();
        assert_eq!(host.board().rehint(host.all()), u32::from(unhinted));
        ran.extend(host.work_off(LAST));
        ran.sort_unstable();
        let accepted = host.heap.state(0).state() == Some(SlotState::Done);
        assert_eq!(ran, if accepted { vec![5, 6] } else { vec![6] });
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_pass_whose_submitter_was_killed_is_found_among_the_slots() {
    killed_at_every_step(None, |fate| {
        let host = Host::new(2, 4);
        let fate = fate.clone();
        let killed = spawn(&host, move |host| {
            fate.befall(|| host.submit(0, 5));
        });
        let mut ran = host.work_off(FIRST);
        ran.extend(host.work_off_unhinted(FIRST));
        end(killed);
        ran.extend(host.work_off_unhinted(LAST));
        let accepted = host.heap.state(0).state() == Some(SlotState::Done);
        assert_eq!(ran, if accepted { vec![5] } else { vec![] });
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_worker_killed_at_any_step_costs_no_pass() {
    killed_at_every_step(Some(2), |fate| {
        let host = Host::new(2, 4);
        host.submit(0, 5);
        host.submit(1, 6);
        let fate = fate.clone();
        let killed = spawn(&host, move |host| {
            fate.befall(|| host.work(&mut Walker::default(), FIRST));
        });
        let other = spawn(&host, |host| host.work(&mut Walker::default(), SECOND));
        end(killed);
        host.recover(FIRST);
        end(other);
        host.work_off(LAST);
        assert_eq!(host.collect(), [(0, 5 + REPLY), (1, 6 + REPLY)]);
        host.still_works();
    });
}

#[test]
fn a_recoverer_killed_at_any_step_is_followed_by_another() {
    killed_at_every_step(Some(3), |fate| {
        let host = Host::new(3, 4);
        let mut walker = Walker::default();
        // Killed while it ran its first, its last attempt of the second, and before it told of the
        // third.
        host.submit(0, 5);
        host.submit_call(1, 6, Call { attempts: 1, ..call(RED) });
        host.submit(2, 7);
        let claims: Vec<Claim> =
            (0..3).filter_map(|_| host.board().claim(&mut walker, FIRST, anything)).collect();
        host.replies[2].set(7 + REPLY);
        assert!(host.board().complete(claims[2]));
        let fate = fate.clone();
        let killed = spawn(&host, move |host| {
            fate.befall(|| host.recover(FIRST));
        });
        let worker = spawn(&host, |host| {
            let ran = host.work_off(SECOND);
            let poisoned = host.board().done(1).is_some();
            assert!(!poisoned || host.replies[1].get() == POISON);
            ran
        });
        end(killed);
        host.recover(FIRST);
        let mut ran = end(worker);
        // The first recoverer may have been killed between a pass's word and its hint.
        ran.extend(host.work_off_unhinted(LAST));
        assert_eq!(ran, [5]);
        assert_eq!(host.collect(), [(0, 5 + REPLY), (1, POISON), (2, 7 + REPLY)]);
        host.still_works();
    });
}

/// How a worker's look for work ended.
enum Rest {
    /// With a pass that takes for ever, and a worker that was woken in its place.
    Busy(Option<WorkerIndex>),
    Asleep,
}

/// One look for work before the worker announces its sleep and one after.
fn look_and_sleep(
    host: &Host,
    worker: WorkerIndex,
    mut look: impl FnMut(&Host) -> Option<Claim>,
) -> Rest {
    if look(host).is_some() { Rest::Busy(None) } else { announce_sleep(host, worker, look) }
}

fn announce_sleep(
    host: &Host,
    worker: WorkerIndex,
    mut look: impl FnMut(&Host) -> Option<Claim>,
) -> Rest {
    host.board().fall_asleep(worker);
    if look(host).is_none() {
        return Rest::Asleep;
    }
    if host.board().wake_up(worker) {
        return Rest::Busy(None);
    }
    Rest::Busy(host.board().take_sleeper(|_| true))
}

#[test]
fn no_worker_sleeps_while_a_hint_stands_unless_it_is_being_woken() {
    in_every_order(Some(3), || {
        let host = Host::new(2, 4);
        let publish = |slot| {
            move |host: &Host| {
                host.submit(slot, 5);
                host.board().take_sleeper(|_| true)
            }
        };
        let (first, second) = (spawn(&host, publish(0)), spawn(&host, publish(1)));
        let mut walker = Walker::default();
        let look = |host: &Host| host.board().claim(&mut walker, FIRST, anything);
        let rest = look_and_sleep(&host, FIRST, look);
        let woken = [end(first), end(second)].into_iter().flatten().next();
        match rest {
            Rest::Asleep => assert_eq!(woken, Some(FIRST)),
            Rest::Busy(_) => assert_eq!(host.work_off(LAST), [5]),
        }
    });
}

#[test]
fn a_worker_woken_for_a_pass_while_it_takes_another_wakes_the_next() {
    in_every_order(None, || {
        let host = Host::new(2, 4);
        host.board().fall_asleep(SECOND);
        // Its submitter was killed before it woke anyone, and the first worker has just looked.
        host.submit(0, 5);
        let first = spawn(&host, |host| {
            let mut walker = Walker::default();
            announce_sleep(host, FIRST, |host| host.board().claim(&mut walker, FIRST, anything))
        });
        host.submit(1, 6);
        let mut woken = Vec::from_iter(host.board().take_sleeper(|_| true));
        let rest = end(first);
        if let Rest::Busy(next) = rest {
            woken.extend(next);
        }
        let waits = (0..2).any(|slot| host.heap.state(slot).is_ready());
        let first_comes = matches!(rest, Rest::Asleep) && woken.contains(&FIRST);
        assert!(!waits || first_comes || woken.contains(&SECOND), "a pass waits beside a sleeper");
    });
}

#[test]
fn no_client_sleeps_on_a_reply_unless_it_is_being_woken() {
    in_every_order(Some(3), || {
        let host = Host::new(2, 4);
        host.submit(0, 5);
        host.submit(1, 6);
        let worker = |worker| {
            move |host: &Host| {
                let claim = host.board().claim(&mut Walker::default(), worker, anything)?;
                Some(host.run(claim).1)
            }
        };
        let (first, second) = (spawn(&host, worker(FIRST)), spawn(&host, worker(SECOND)));
        host.board().client_falls_asleep(&host.sleeping);
        let asleep = host.collect().is_empty();
        let woken = [end(first), end(second)].into_iter().flatten().any(|woken| woken);
        assert!(!asleep || woken);
        host.work_off(LAST);
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_client_that_looks_at_the_slot_sees_the_reply() {
    in_every_order(None, || {
        let host = Host::new(1, 2);
        host.submit(0, 5);
        let worker = spawn(&host, |host| host.work(&mut Walker::default(), FIRST));
        if let Some(done) = host.board().done(0) {
            assert_eq!(host.replies[0].get(), 5 + REPLY);
            host.board().collect(0, done).expect("it is done");
            // The worker's bit, of the pass before, stands for none now.
            host.submit(0, 6);
            host.collect();
        }
        end(worker);
        host.work_off(LAST);
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_call_is_taken_back_or_claimed_and_its_hint_stands_for_no_other() {
    in_every_order(Some(4), || {
        let host = Host::new(2, 4);
        let client = spawn(&host, |host| {
            let ready = host.submit(0, 5);
            let taken_back = host.board().take_back(0, ready).is_some();
            host.submit(1, 6);
            if taken_back {
                host.submit(0, 7);
            }
            taken_back
        });
        let mut walker = Walker::default();
        let mut ran: Vec<u64> = (0..2).filter_map(|_| host.work(&mut walker, FIRST)).collect();
        let taken_back = end(client);
        ran.extend(host.work_off(LAST));
        assert_eq!(ran, if taken_back { [6, 7] } else { [5, 6] });
        host.collect();
        host.still_works();
    });
}

/// A ring with two hints, of passes that wait for a worker that knows blue, and no room.
fn full_of_blue(slots: u32) -> Rc<Host> {
    let host = Host::new(slots, 2);
    host.submit_call(0, 5, call(BLUE));
    host.submit_call(1, 6, call(BLUE));
    host
}

#[test]
fn a_pass_that_no_ring_has_room_for_is_seen_before_sleep() {
    in_every_order(Some(3), || {
        let host = full_of_blue(3);
        let submitter = spawn(&host, |host| {
            host.submit(2, 7);
            host.board().take_sleeper(|_| true)
        });
        let mut walker = Walker::default();
        let red = |closure| closure == RED;
        let rest = look_and_sleep(&host, FIRST, |host| {
            let hinted = host.board().claim(&mut walker, FIRST, red);
            hinted.or_else(|| host.board().scan(host.all(), &mut walker, FIRST, red))
        });
        let woken = end(submitter);
        let waits = host.heap.state(2).is_ready();
        assert!(!matches!(rest, Rest::Asleep) || !waits || woken == Some(FIRST));
        let ran = host.work_off_unhinted(LAST);
        assert_eq!(ran, if waits { vec![5, 6, 7] } else { vec![5, 6] });
    });
}

#[test]
fn two_that_make_room_at_once_lose_no_pass() {
    in_every_order(Some(1), || {
        let host = full_of_blue(4);
        let other = spawn(&host, |host| {
            host.submit(2, 7);
        });
        host.submit(3, 8);
        end(other);
        let mut ran = host.work_off(FIRST);
        assert_eq!(ran.len(), 2, "a full ring stays full");
        assert_eq!(host.board().rehint(host.all()), 2);
        ran.extend(host.work_off(LAST));
        ran.sort_unstable();
        assert_eq!(ran, [5, 6, 7, 8]);
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_submitter_killed_while_it_makes_room_loses_no_pass() {
    killed_at_every_step(Some(3), |fate| {
        let host = Host::new(3, 2);
        // What was taken back leaves a hint that makes room, behind one that is good.
        host.submit_call(0, 5, call(BLUE));
        let ready = host.submit(1, 6);
        host.board().take_back(1, ready).expect("nobody has claimed it");
        let fate = fate.clone();
        let killed = spawn(&host, move |host| fate.befall(|| host.submit(2, 7)).is_none());
        let red = |closure| closure == RED;
        let claim = host.board().claim(&mut Walker::default(), FIRST, red);
        let mut ran: Vec<u64> = claim.into_iter().map(|claim| host.run(claim).0).collect();
        let killed = end(killed);
        let rehinted = host.board().rehint(host.all());
        assert!(killed || rehinted == 0, "there was room for both");
        ran.extend(host.work_off(LAST));
        ran.sort_unstable();
        let accepted = host.heap.state(2).state() == Some(SlotState::Done);
        assert_eq!(ran, if accepted { vec![5, 7] } else { vec![5] });
        assert!(killed || accepted);
        host.collect();
        host.still_works();
    });
}

#[test]
fn a_hint_that_a_worker_cannot_use_is_in_nobodys_way() {
    killed_at_every_step(Some(3), |fate| {
        let host = Host::new(2, 4);
        host.submit_call(0, 5, call(BLUE));
        host.submit(1, 6);
        let fate = fate.clone();
        let killed = spawn(&host, move |host| {
            fate.befall(|| {
                let claim = host.board().claim(&mut Walker::default(), FIRST, |id| id == BLUE);
                host.run(claim.expect("nobody else knows blue"));
            });
        });
        let claim = host.board().claim(&mut Walker::default(), SECOND, |id| id == RED);
        host.run(claim.expect("it is hinted, and nobody else knows red"));
        end(killed);
        host.recover(FIRST);
        host.work_off(LAST);
        assert_eq!(host.collect(), [(0, 5 + REPLY), (1, 6 + REPLY)]);
        host.still_works();
    });
}

#[test]
fn submitters_and_a_worker_go_round_a_ring_of_two() {
    in_every_order(Some(3), || {
        let host = Host::new(2, 2);
        let submitter = |slot, argument| move |host: &Host| host.submit(slot, argument);
        let mut walker = Walker::default();
        host.submit(0, 5);
        assert_eq!(host.work(&mut walker, FIRST), Some(5));
        host.collect();
        let (first, second) = (spawn(&host, submitter(0, 6)), spawn(&host, submitter(1, 7)));
        let mut ran: Vec<u64> = (0..2).filter_map(|_| host.work(&mut walker, FIRST)).collect();
        end(first);
        end(second);
        ran.extend(host.work_off(LAST));
        ran.sort_unstable();
        assert_eq!(ran, [6, 7]);
        host.collect();
        host.still_works();
    });
}
