//! Kills a process at every instruction boundary of every operation on the pass memory.
//!
//! A victim process stops itself, does one operation of the production code, and signals itself. The
//! test steps it one machine instruction at a time and kills it after `k` of them, for each `k` from
//! the first to the last. After each kill the survivors recover, and it is checked that
//!
//! - a pass of the victim was never accepted, or is run and comes to a client of the victim's name
//!   exactly once; one that the victim collected is free only after the victim had been told its end;
//! - the passes of the others come back exactly once each, with the right result;
//! - no row stays taken, and the rings serve three rounds of their cells more.
//!
//! System calls count as one step, as the kernel does them whole. To come to the `k`-th instruction
//! the test does not step through all before it: one victim's steps are recorded, and later ones run
//! at full speed, by a breakpoint, to an instruction shortly before the `k`-th to which the recorded
//! one had come once or a few times. One that does not arrive where the recorded one was is stepped
//! from its start.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::io::{PipeReader, Read};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use meshwork::actors::host::parking::wait;
use meshwork::actors::host::pass::{Completion, Pass, PassOutcome};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::pass_ring::{ClaimedCall, WorkerSeat};
use meshwork::actors::host::reclaimer::{ReclaimReport, Reclaimer, ReclaimerOptions};
use meshwork::protocol::pass::frame::{Reply, Status};
use meshwork::protocol::pass::layout::Geometry;
use meshwork::protocol::pass::{ClosureId, WorkerIndex};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::personality::{self, Persona};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::passes;

const GEOMETRY: Geometry =
    Geometry { clients: 2, slots_per_client: 64, workers: 64, payload_bytes: 4_096 };

/// Passes that must still run after a kill: three rounds of a ring's cells.
const FURTHER: u64 = 3 * 256;

/// More than any operation has.
const STEPS_MAX: usize = 200_000;

/// What the victim submits or collects is marked from here on.
const VICTIMS: u64 = 1_000;

pub(crate) fn main() -> ExitCode {
    let tests: Vec<passes::Named<fn()>> = vec![
        ("a_kill_at_any_instruction_of_submit_harms_nobody", || run(&SUBMIT)),
        ("a_kill_at_any_instruction_of_submit_to_a_sleeper_harms_nobody", || run(&SUBMIT_LONG)),
        ("a_kill_at_any_instruction_of_submit_together_harms_nobody", || run(&SUBMIT_TOGETHER)),
        ("a_kill_at_any_instruction_of_cancel_harms_nobody", || run(&CANCEL)),
        ("a_kill_at_any_instruction_of_claim_run_complete_harms_nobody", || run(&COMPLETE)),
        ("a_kill_at_any_instruction_of_falling_asleep_harms_nobody", || run(&SLEEP)),
        ("a_kill_at_any_instruction_of_collect_harms_nobody", || run(&COLLECT)),
        ("a_kill_at_any_instruction_of_recover_harms_nobody", || run(&RECOVER)),
        ("a_kill_at_any_instruction_of_tend_harms_nobody", || run(&TEND)),
        ("a_kill_at_any_instruction_of_joining_as_worker_harms_nobody", || run(&JOIN_WORKER)),
        ("a_kill_at_any_instruction_of_leaving_as_worker_harms_nobody", || run(&LEAVE_WORKER)),
        ("a_kill_at_any_instruction_of_joining_as_client_harms_nobody", || run(&JOIN_CLIENT)),
        ("a_kill_at_any_instruction_of_taking_a_strangers_row_harms_nobody", || run(&EVICT)),
        ("a_kill_at_any_instruction_of_leaving_as_client_harms_nobody", || run(&LEAVE_CLIENT)),
    ];
    passes::main(&tests, &[("victim", victim)])
}

struct Operation {
    name: &'static str,
    /// Leaves what the victim will find.
    prepare: fn(&mut Scene),
    /// In the victim: joins, and returns what will be stepped through.
    victim: fn(&Arc<PassHost>) -> Box<dyn FnOnce()>,
    /// Which passes of the victim's name must come back, and which may.
    must: &'static [u64],
    may: &'static [u64],
}

fn echo() -> ClosureId {
    ClosureId::of_name("echo")
}

fn pass(tag: u64) -> Pass<'static> {
    Pass::new(echo(), tag.to_le_bytes().to_vec()).tag(tag)
}

fn named(name: &str) -> ClientOptions {
    ClientOptions { name: name.into(), ..ClientOptions::default() }
}

const SUBMIT: Operation = Operation {
    name: "submit",
    prepare: |scene| scene.submit(4),
    victim: |host| {
        let client = ManuallyDrop::new(PassClient::join(host, named("victim")).unwrap());
        let pass = ManuallyDrop::new(pass(VICTIMS));
        Box::new(move || std::mem::forget(client.submit(&pass)))
    },
    must: &[],
    may: &[VICTIMS],
};

const SUBMIT_LONG: Operation = Operation {
    name: "submit, to a sleeper",
    prepare: |scene| {
        scene.submit(4);
        scene.seat.ring().fall_asleep(scene.seat.index());
    },
    victim: |host| {
        let client = ManuallyDrop::new(PassClient::join(host, named("victim")).unwrap());
        let mut args = VICTIMS.to_le_bytes().to_vec();
        args.resize(1_000, 7);
        let pass = ManuallyDrop::new(Pass::new(echo(), args).tag(VICTIMS).low_priority());
        Box::new(move || std::mem::forget(client.submit(&pass)))
    },
    must: &[],
    may: &[VICTIMS],
};

/// Some may have been submitted: nobody had been told that all were.
const SUBMIT_TOGETHER: Operation = Operation {
    name: "submit three together",
    prepare: |scene| scene.submit(4),
    victim: |host| {
        let client = ManuallyDrop::new(PassClient::join(host, named("victim")).unwrap());
        let passes = ManuallyDrop::new([0, 1, 2].map(|tag| pass(VICTIMS + tag)));
        Box::new(move || client.prepare_all(&*passes).unwrap().submit())
    },
    must: &[],
    may: &[VICTIMS, VICTIMS + 1, VICTIMS + 2],
};

const CANCEL: Operation = Operation {
    name: "cancel",
    prepare: |scene| scene.submit(4),
    victim: |host| {
        let client = ManuallyDrop::new(PassClient::join(host, named("victim")).unwrap());
        let id = client.submit(&pass(VICTIMS)).unwrap();
        Box::new(move || assert!(client.cancel(id)))
    },
    must: &[],
    may: &[VICTIMS],
};

const COMPLETE: Operation = Operation {
    name: "claim, run, complete",
    prepare: |scene| {
        scene.submit(4);
        // So that the victim has someone to wake.
        scene.host.ring().client(scene.client.index()).sleeping().store(1, SeqCst);
    },
    victim: |host| {
        let mut seat = ManuallyDrop::new(host.join_worker("victim").unwrap());
        Box::new(move || complete(seat.claim(|id| id == echo()).unwrap()))
    },
    must: &[],
    may: &[],
};

const SLEEP: Operation = Operation {
    name: "fall asleep, look, wait, wake up",
    prepare: |_| {},
    victim: |host| {
        let ring = Arc::clone(host.ring());
        let mut seat = ManuallyDrop::new(host.join_worker("victim").unwrap());
        Box::new(move || {
            let row = ring.worker(seat.index());
            ring.fall_asleep(seat.index());
            if seat.claim(|_| true).is_none() && seat.scan(|_| true).is_none() {
                wait(row.wake_word(), 0, Duration::from_micros(1));
            }
            ring.wake_up(seat.index());
        })
    },
    must: &[],
    may: &[],
};

const COLLECT: Operation = Operation {
    name: "collect",
    prepare: |scene| {
        scene.leave("victim", 3, 0);
        scene.submit(4);
    },
    victim: |host| {
        let client = ManuallyDrop::new(PassClient::join(host, named("victim")).unwrap());
        Box::new(move || {
            client.poll(|end| {
                // Told before the slot is free.
                let _ = nix::unistd::write(std::io::stdout(), &end.tag.to_le_bytes());
            });
        })
    },
    must: &[],
    may: &[VICTIMS, VICTIMS + 1, VICTIMS + 2],
};

const RECOVER: Operation = Operation {
    name: "recover a worker",
    prepare: die_at_work,
    victim: |host| {
        let mut reclaimer = ManuallyDrop::new(Reclaimer::new(host, ReclaimerOptions::default()));
        let mut report = ManuallyDrop::new(ReclaimReport::default());
        // The survivor has the first row.
        Box::new(move || reclaimer.probe_worker(WorkerIndex(1), &mut report).unwrap())
    },
    must: &[],
    may: &[],
};

const TEND: Operation = Operation {
    name: "tend",
    prepare: |scene| {
        scene.leave("victim", 1, 1);
        die_at_work(scene);
    },
    victim: |host| {
        let mut reclaimer = ManuallyDrop::new(Reclaimer::new(host, ReclaimerOptions::default()));
        let mut report = ManuallyDrop::new(ReclaimReport::default());
        Box::new(move || reclaimer.tend(&mut report).unwrap())
    },
    must: &[VICTIMS, VICTIMS + 1],
    may: &[],
};

const JOIN_WORKER: Operation = Operation {
    name: "join as worker, in a dead one's row",
    prepare: die_at_work,
    victim: |host| {
        let host = Arc::clone(host);
        Box::new(move || std::mem::forget(host.join_worker("victim")))
    },
    must: &[],
    may: &[],
};

const LEAVE_WORKER: Operation = Operation {
    name: "leave as worker",
    prepare: |scene| scene.submit(4),
    victim: |host| {
        let (host, seat) = (Arc::clone(host), host.join_worker("victim").unwrap());
        Box::new(move || host.leave_worker(seat))
    },
    must: &[],
    may: &[],
};

const JOIN_CLIENT: Operation = Operation {
    name: "join as client, after one of the name",
    prepare: |scene| {
        scene.leave("victim", 1, 1);
        scene.submit(4);
    },
    victim: |host| {
        let host = Arc::clone(host);
        Box::new(move || std::mem::forget(PassClient::join(&host, named("victim"))))
    },
    must: &[VICTIMS, VICTIMS + 1],
    may: &[],
};

/// Every row is taken: the victim takes that of a dead client of another name.
const EVICT: Operation = Operation {
    name: "join as client, in the row of one of another name",
    prepare: |scene| {
        // None that waits: whoever looks for its hint hashes with a random key, and goes another way
        // each time.
        scene.leave("other", 3, 0);
        scene.submit(4);
    },
    victim: JOIN_CLIENT.victim,
    must: &[],
    may: &[],
};

const LEAVE_CLIENT: Operation = Operation {
    name: "leave as client, with passes under way",
    prepare: |scene| {
        scene.leave("victim", 1, 1);
        scene.submit(4);
    },
    victim: |host| {
        let leaving = PassClient::join(host, named("victim")).unwrap();
        Box::new(move || drop(leaving))
    },
    must: &[VICTIMS, VICTIMS + 1],
    may: &[],
};

/// A worker dies with a pass that has attempts left, one that has none, and one that is done.
fn die_at_work(scene: &mut Scene) {
    scene.submit(4);
    let last_try = pass(scene.take_tag()).attempts(1);
    scene.client.submit(&last_try).unwrap();
    scene.poisoned_at_most = 1;
    let mut seat = scene.host.join_worker("dead").unwrap();
    assert_eq!(seat.index(), WorkerIndex(1));
    complete(seat.claim(|_| true).unwrap());
    while seat.claim(|_| true).is_some() {}
}

fn complete(mut call: ClaimedCall<'_>) {
    let (args, mut reply) = call.parts();
    reply.write(args);
    let bytes = args.len() as u32;
    call.complete(Reply { status: Status::Returned, bytes, cut: false });
}

fn victim(words: &[&str]) {
    let [directory, index] = words else { panic!("a directory and an operation") };
    let operation = OPERATIONS[index.parse::<usize>().unwrap()];
    let host = PassHost::open(Path::new(directory), None).unwrap();
    let operate = (operation.victim)(&host);
    ptrace::traceme().unwrap();
    raise(Signal::SIGSTOP).unwrap();
    operate();
    raise(Signal::SIGUSR1).unwrap();
}

const OPERATIONS: [&Operation; 14] = [
    &SUBMIT,
    &SUBMIT_LONG,
    &SUBMIT_TOGETHER,
    &CANCEL,
    &COMPLETE,
    &SLEEP,
    &COLLECT,
    &RECOVER,
    &TEND,
    &JOIN_WORKER,
    &LEAVE_WORKER,
    &JOIN_CLIENT,
    &EVICT,
    &LEAVE_CLIENT,
];

/// The survivors, and what they expect.
struct Scene {
    directory: tempfile::TempDir,
    host: Arc<PassHost>,
    seat: WorkerSeat,
    client: PassClient,
    next_tag: u64,
    /// Passes of the surviving client that are under way.
    submitted: Vec<u64>,
    poisoned_at_most: usize,
    /// What the victim left in the slots, and how often.
    left: BTreeMap<String, u64>,
    faults: Vec<String>,
    boundaries: usize,
    astray: usize,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let host = PassHost::open(directory.path(), Some(GEOMETRY)).unwrap();
        let seat = host.join_worker("survivor").unwrap();
        let row = host.ring().closure_row(echo(), "echo").unwrap();
        seat.row().runs[usize::from(row) / 64].store(1 << (row % 64), Relaxed);
        let client = PassClient::join(&host, named("survivor")).unwrap();
        Self {
            directory,
            host,
            seat,
            client,
            next_tag: 0,
            submitted: Vec::new(),
            poisoned_at_most: 0,
            left: BTreeMap::new(),
            faults: Vec::new(),
            boundaries: 0,
            astray: 0,
        }
    }

    fn take_tag(&mut self) -> u64 {
        let tag = self.next_tag;
        self.next_tag = (self.next_tag + 1) % VICTIMS;
        self.submitted.push(tag);
        tag
    }

    fn submit(&mut self, count: usize) {
        for index in 0..count {
            let pass = pass(self.take_tag());
            let pass = if index.is_multiple_of(2) { pass } else { pass.low_priority() };
            self.client.submit(&pass).unwrap();
        }
    }

    /// A client of that name dies, and leaves some passes that are done and some that wait.
    fn leave(&mut self, name: &str, done: u64, waiting: u64) {
        let client = PassClient::join(&self.host, named(name)).unwrap();
        for tag in 0..done {
            client.submit(&pass(VICTIMS + tag)).unwrap();
        }
        self.run_all();
        for tag in done..done + waiting {
            client.submit(&pass(VICTIMS + tag)).unwrap();
        }
    }

    /// The surviving worker runs all that it finds.
    fn run_all(&mut self) -> usize {
        let slots = self.host.ring().layout().slot_count() as usize;
        let mut ran = 0;
        while let Some(call) = self.seat.claim(|_| true) {
            complete(call);
            ran += 1;
            assert!(ran <= slots, "the rings never end");
        }
        while let Some(call) = self.seat.scan(|_| true) {
            complete(call);
            ran += 1;
            assert!(ran <= slots, "the slots never end");
        }
        ran
    }

    /// Starts a victim, lets `advance` have it, and kills it. What `advance` said, and what the victim
    /// had told.
    fn with_victim<R>(
        &self,
        operation: &Operation,
        advance: impl FnOnce(Pid) -> R,
    ) -> (R, Vec<u64>) {
        let index = OPERATIONS.iter().position(|known| known.name == operation.name).unwrap();
        let directory = self.directory.path().to_str().unwrap();
        let (told, teller) = std::io::pipe().unwrap();
        let mut command = passes::command("victim", &[directory, &index.to_string()]);
        let started = command.stdin(Stdio::null()).stdout(teller).spawn().unwrap();
        // With its copy of the pipe.
        drop(command);
        let pid = Pid::from_raw(started.id() as i32);
        let status = waitpid(pid, None).unwrap();
        assert_eq!(status, WaitStatus::Stopped(pid, Signal::SIGSTOP), "{}", operation.name);
        let advanced = advance(pid);
        kill(pid, Signal::SIGKILL).unwrap();
        waitpid(pid, None).unwrap();
        (advanced, tags(told))
    }

    fn states(&self) -> String {
        let ring = self.host.ring();
        let mut counts = [0; 4];
        for slot in 0..ring.layout().slot_count() {
            counts[ring.word(slot).state().unwrap() as usize] += 1;
        }
        let [_, ready, claimed, done] = counts;
        format!("{ready} READY, {claimed} CLAIMED, {done} DONE")
    }

    fn fault(&mut self, k: usize, what: &str) {
        self.faults.push(format!("killed after {k}: {what}"));
    }

    /// One victim, and what it leaves.
    fn try_victim<R>(
        &mut self,
        operation: &Operation,
        k: usize,
        advance: impl FnOnce(Pid) -> R,
    ) -> R {
        self.poisoned_at_most = 0;
        (operation.prepare)(self);
        let (advanced, told) = self.with_victim(operation, advance);
        *self.left.entry(self.states()).or_default() += 1;
        let mut report = ReclaimReport::default();
        Reclaimer::new(&self.host, ReclaimerOptions::default()).tend(&mut report).unwrap();
        self.run_all();
        self.check_survivor(k);
        self.check_victim(operation, k, &told);
        self.check_rows(k);
        self.check_ring(k);
        advanced
    }

    fn check_survivor(&mut self, k: usize) {
        let mut expected = std::mem::take(&mut self.submitted);
        let mut ends = Vec::new();
        for _ in 0..4 {
            self.client.poll(|end| ends.push(end.into_owned()));
        }
        let mut poisoned = 0;
        for end in ends {
            match expected.iter().position(|tag| *tag == end.tag) {
                Some(at) => drop(expected.swap_remove(at)),
                None => self.fault(k, &format!("a survivor's pass came twice: {end:?}")),
            }
            poisoned += usize::from(end.outcome == PassOutcome::Poisoned);
            if end.outcome != PassOutcome::Poisoned && !is_right(&end) {
                self.fault(k, &format!("a wrong result: {end:?}"));
            }
        }
        if !expected.is_empty() {
            self.fault(k, &format!("lost of the survivor's: {expected:?}"));
        }
        if poisoned > self.poisoned_at_most {
            self.fault(k, &format!("{poisoned} poisoned"));
        }
    }

    fn check_victim(&mut self, operation: &Operation, k: usize, told: &[u64]) {
        let successor = PassClient::join(&self.host, named("victim")).unwrap();
        let mut came = Vec::new();
        for _ in 0..4 {
            successor.poll(|end| came.push(end.into_owned()));
        }
        let mut tags: Vec<u64> = came.iter().map(|end| end.tag).collect();
        tags.sort_unstable();
        if tags.windows(2).any(|two| two[0] == two[1]) || !came.iter().all(is_right) {
            self.fault(k, &format!("the victim's passes came twice or wrong: {came:?}"));
        }
        let is_known = |tag: &u64| operation.must.contains(tag) || operation.may.contains(tag);
        if !tags.iter().all(is_known) || !operation.must.iter().all(|tag| tags.contains(tag)) {
            self.fault(k, &format!("lost or strange: the victim's successor was told {tags:?}"));
        }
        if operation.name == "collect" {
            for tag in operation.may {
                if !tags.contains(tag) && !told.contains(tag) {
                    self.fault(k, &format!("lost: {tag} was told to nobody"));
                }
            }
        }
    }

    fn check_rows(&mut self, k: usize) {
        let ring = self.host.ring();
        let workers = ring.workers().iter().map(|row| &row.holder);
        let clients = ring.clients().iter().map(|row| &row.holder);
        let held = workers.chain(clients).filter(|holder| holder.epoch.load(SeqCst) % 2 == 1);
        let held = held.count();
        if held != 2 {
            self.fault(k, &format!("{held} rows are held, by two survivors"));
        }
    }

    fn check_ring(&mut self, k: usize) {
        for round in 0..FURTHER {
            let pass = pass(round);
            let pass = if round.is_multiple_of(3) { pass.low_priority() } else { pass };
            if self.client.submit(&pass).is_err() {
                return self.fault(k, "wedged: no room");
            }
            match self.seat.claim(|_| true) {
                Some(call) => complete(call),
                None => return self.fault(k, "wedged: no hint"),
            }
            if self.client.poll(|end| assert_eq!(end.tag, round)) != 1 {
                return self.fault(k, "wedged: no reply");
            }
        }
    }
}

fn is_right(end: &Completion<'_>) -> bool {
    match &end.outcome {
        PassOutcome::Returned(bytes) => bytes.starts_with(&end.tag.to_le_bytes()),
        _ => false,
    }
}

fn tags(mut told: PipeReader) -> Vec<u64> {
    let mut bytes = Vec::new();
    told.read_to_end(&mut bytes).unwrap();
    bytes.chunks_exact(8).map(|tag| u64::from_le_bytes(tag.try_into().unwrap())).collect()
}

/// The instructions of one run of an operation.
struct Trace {
    /// Where the victim stands after so many steps.
    at: Vec<u64>,
    /// For each, the step up to it from where it is reached soonest, and how often the victim has come
    /// to that instruction by then.
    anchors: Vec<(usize, usize)>,
}

/// Victims that may go another way than the recorded one, as those do that hash with a random key,
/// before one is stepped from its start.
const TRIES: usize = 4;

/// What it costs to run to a breakpoint, in steps.
const HIT_COST: usize = 4;

impl Trace {
    fn record(pid: Pid) -> Self {
        let start = position(pid);
        let (mut at, mut anchors) = (vec![start], vec![(0, 0)]);
        let mut visits: HashMap<u64, usize> = HashMap::new();
        let mut cost = 0;
        while step(pid) {
            let here = position(pid);
            at.push(here);
            let k = at.len() - 1;
            assert!(k < STEPS_MAX, "the operation has no end");
            let hits = visits.entry(here).or_default();
            *hits += 1;
            cost += 1;
            // The victim starts on that instruction, and so would be stopped at once.
            if here != start && *hits * HIT_COST < cost {
                cost = *hits * HIT_COST;
                anchors.push((k, *hits));
            } else {
                anchors.push(anchors[k - 1]);
            }
        }
        Self { at, anchors }
    }

    /// Brings a victim to where it is after `k` steps: at full speed to an instruction that it comes
    /// to seldom, and from there in steps. False if it went another way than the recorded one.
    fn go_to(&self, pid: Pid, k: usize) -> bool {
        let (anchor, hits) = self.anchors[k];
        for hit in 0..hits {
            let place = self.at[anchor] as *mut c_void;
            let instruction = ptrace::read(pid, place).unwrap();
            if hit > 0 && !step(pid) {
                return false;
            }
            ptrace::write(pid, place, instruction & !0xff | BREAKPOINT).unwrap();
            ptrace::cont(pid, None).unwrap();
            if waitpid(pid, None).unwrap() != WaitStatus::Stopped(pid, Signal::SIGTRAP) {
                return false;
            }
            ptrace::write(pid, place, instruction).unwrap();
            let mut registers = ptrace::getregs(pid).unwrap();
            registers.rip = self.at[anchor];
            ptrace::setregs(pid, registers).unwrap();
        }
        (anchor..k).all(|_| step(pid)) && position(pid) == self.at[k]
    }
}

/// `int3`.
const BREAKPOINT: i64 = 0xcc;

/// False if the operation had ended.
fn step(pid: Pid) -> bool {
    loop {
        ptrace::step(pid, None).unwrap();
        match waitpid(pid, None).unwrap() {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => return true,
            WaitStatus::Stopped(_, Signal::SIGUSR1) => return false,
            // Someone outside holds everything up for a while: before the instruction, or after it,
            // which is then seen where the victim arrives.
            WaitStatus::Stopped(_, Signal::SIGSTOP | Signal::SIGCONT) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn position(pid: Pid) -> u64 {
    ptrace::getregs(pid).unwrap().rip
}

/// Steps through an operation on every processor, each with a directory of its own.
fn run(operation: &'static Operation) {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<_> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap()).collect();
    let shares = cpus.len();
    let threads: Vec<_> = (0..)
        .zip(cpus)
        .map(|(share, cpu)| std::thread::spawn(move || step_through(operation, share, shares, cpu)))
        .collect();
    let scenes: Vec<_> = threads.into_iter().map(|one| one.join().unwrap()).collect();
    let boundaries: usize = scenes.iter().map(|scene| scene.boundaries).sum();
    let astray: usize = scenes.iter().map(|scene| scene.astray).sum();
    let mut left: BTreeMap<&str, u64> = BTreeMap::new();
    for (states, times) in scenes.iter().flat_map(|scene| &scene.left) {
        *left.entry(states).or_default() += times;
    }
    let faults: Vec<_> = scenes.iter().flat_map(|scene| &scene.faults).collect();
    let count = |word: &str| faults.iter().filter(|fault| fault.contains(word)).count();
    println!(
        "{}: {boundaries} boundaries ({astray} stepped to from the start), lost {}, wedged {}, \
         other faults {}; left by the victim {left:?}",
        operation.name,
        count("lost"),
        count("wedged"),
        faults.len() - count("lost") - count("wedged"),
    );
    assert!(faults.is_empty(), "{:#?}", &faults[..faults.len().min(20)]);
}

/// Kills victims after every `shares`-th number of steps.
fn step_through(operation: &Operation, share: usize, shares: usize, cpu: usize) -> Scene {
    // Victims inherit both. They and the test take turns on one processor, which is faster than to
    // wake another; and one victim's instructions are where another's are.
    let mut one = CpuSet::new();
    one.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &one).unwrap();
    personality::set(personality::get().unwrap() | Persona::ADDR_NO_RANDOMIZE).unwrap();
    let mut scene = Scene::new();
    let trace = scene.try_victim(operation, 0, Trace::record);
    for k in (share..trace.at.len()).step_by(shares) {
        scene.boundaries += 1;
        let arrived = (0..TRIES).any(|_| scene.try_victim(operation, k, |pid| trace.go_to(pid, k)));
        if !arrived {
            // What a victim leaves after `k` steps, whichever way it goes.
            scene.astray += 1;
            scene.try_victim(operation, k, |pid| (0..k).all(|_| step(pid)));
        }
    }
    scene
}
