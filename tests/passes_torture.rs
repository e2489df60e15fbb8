//! Kills, stops and restarts clients, workers and reclaimers at random, and keeps a ledger of tokens.
//!
//! Each client writes to a pipe, one record in one write, which the kernel keeps when the writer is
//! killed:
//!
//! | record | written |
//! |---|---|
//! | about `t` | before it submits `t` |
//! | accepted `t`, refused `t` | after |
//! | cancelling `t` | before it takes `t` back, which may be too late |
//! | returned `t` | when it is handed the end of `t`, before the slot is free |
//!
//! A client does one thing at a time, so a kill leaves exactly one thing in doubt: what its last
//! record was about. What is claimed, then, after a phase without faults in which all slots became
//! free:
//!
//! - every token that was accepted returned, to a client of the name that had submitted it, once;
//! - one that its client had begun to take back when it was killed returned once or never: nobody else
//!   can know that it was taken back;
//! - one that was in doubt (the last record of a killed client was "about") returned once or never;
//! - one whose return was the last record of a killed client may have returned once more, to the
//!   successor: the kill fell before the slot was free. No other did;
//! - no token returned that was not submitted, or was refused;
//! - every end is the one that the closure gives for these arguments, or "cancelled" for a token that
//!   was to be taken back; also of closures that hang at their first run, whose worker is killed when
//!   its time is over.
//!
//! Knobs: `MESHWORK_TORTURE_S`, how long (5 s); `MESHWORK_SEED`, for the order of the faults.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(clippy::zombie_processes, reason = "they are awaited by their number, with their status")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ExitCode, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;
use meshwork::actors::clock::Clock;
use meshwork::actors::host::pass::{Completion, Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::reclaimer::{Heart, ReclaimReport, Reclaimer, ReclaimerOptions};
use meshwork::actors::host::registry::{PassCall, PassRegistry};
use meshwork::actors::host::worker_thread::{WorkerOptions, WorkerThread};
use meshwork::passes::Spin;
use meshwork::protocol::pass::layout::Geometry;
use meshwork::protocol::pass::slot::{SlotState, SlotWord};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

mod passes;

const CLIENTS: usize = 3;
const WORKERS: usize = 4;
const RECLAIMERS: usize = 2;

/// Rows for twice the clients, so that a successor that misses its predecessor's is seen to.
const GEOMETRY: Geometry = Geometry {
    clients: 2 * CLIENTS as u32,
    slots_per_client: 64,
    workers: 64,
    payload_bytes: 64 << 10,
};

/// How long the phase without faults may take. It takes a second.
const GRACE: Duration = Duration::from_secs(60);

/// Longer than any run: nothing is given up.
const NEVER: Duration = Duration::from_secs(100_000);

fn main() -> ExitCode {
    passes::main(
        &[("every_token_returns_once_to_its_client_whoever_is_killed", torture)],
        &[("client", client), ("worker", worker), ("reclaimer", reclaimer)],
    )
}

/// What a token stands for: its arguments, its closure and its end.
struct Expected {
    closure: &'static str,
    args: Vec<u8>,
    is_low: bool,
    /// Taken back as soon as it was submitted.
    is_cancelled: bool,
    deadline: Option<Duration>,
}

impl Expected {
    fn of(token: u64) -> Self {
        let mut rng = Rng::with_seed(token);
        let closure = match rng.u16(..) {
            0..=15 => "hang",
            16..=767 => "panic",
            768..=2_559 => "fail",
            2_560..=3_583 => "slow",
            _ => "rotate",
        };
        let deadline = match closure {
            "hang" => Some(Duration::from_millis(3)),
            // A worker may be stopped for that long, and is killed then.
            "rotate" if rng.u8(..) < 16 => Some(Duration::from_millis(20)),
            _ => None,
        };
        let bytes = match rng.u8(0..100) {
            0..=69 => rng.usize(0..=48),
            70..=95 => rng.usize(49..=4_096),
            _ => rng.usize(4_097..=65_536),
        };
        let mut args = vec![0; bytes];
        rng.fill(&mut args);
        Self { closure, args, is_low: rng.bool(), is_cancelled: rng.u8(..) < 16, deadline }
    }

    fn is(&self, outcome: &PassOutcome<'_>) -> bool {
        match (self.closure, outcome) {
            ("panic", PassOutcome::Panicked(said)) => *said == text(&self.args),
            ("fail", PassOutcome::Failed(said)) => *said == text(&self.args),
            ("rotate" | "slow" | "hang", PassOutcome::Returned(bytes)) => {
                **bytes == rotated(&self.args)
            }
            (_, PassOutcome::Cancelled) => self.is_cancelled,
            _ => false,
        }
    }
}

fn rotated(args: &[u8]) -> Vec<u8> {
    let (first, rest) = args.split_at(args.len().min(1));
    [rest, first].concat()
}

fn text(args: &[u8]) -> String {
    format!("{} bytes from {:?}", args.len(), args.first())
}

fn registry() -> PassRegistry {
    let registry = PassRegistry::new();
    registry.register("rotate", |call| Ok::<_, String>(rotated(call.args))).unwrap();
    // Long enough for its worker to be killed or stopped within.
    let slow = |call: &PassCall<'_>| {
        std::thread::sleep(Duration::from_millis(2));
        Ok::<_, String>(rotated(call.args))
    };
    registry.register("slow", slow).unwrap();
    let hang = |call: &PassCall<'_>| {
        if call.attempt == 0 {
            std::thread::sleep(NEVER);
        }
        Ok::<_, String>(rotated(call.args))
    };
    registry.register("hang", hang).unwrap();
    registry.register("fail", |call| Err::<Vec<u8>, _>(text(call.args))).unwrap();
    let panic = |call: &PassCall<'_>| -> Result<Vec<u8>, String> { panic!("{}", text(call.args)) };
    registry.register("panic", panic).unwrap();
    registry
}

/// Runs passes until it is told to stop.
fn worker(words: &[&str]) {
    std::panic::set_hook(Box::new(|_| {}));
    let host = open(words[0]);
    let spin = if words[1] == "spin" { Spin::Adaptive } else { Spin::Never };
    let options = WorkerOptions { name: "worker".into(), spin };
    let worker = WorkerThread::spawn(&host, registry(), &options).unwrap();
    let _beating = std::thread::spawn(move || {
        let heart = Heart::new(&host);
        loop {
            heart.beat();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    passes::told();
    worker.join();
}

/// Looks after the others until it is told to stop.
fn reclaimer(words: &[&str]) {
    let host = open(words[0]);
    let is_told = told_to_stop();
    let grace = Duration::from_millis(20);
    let options = ReclaimerOptions { grace, orphans_after: NEVER };
    let mut reclaimer = Reclaimer::new(&host, options);
    let mut report = ReclaimReport::default();
    for round in 0_u64.. {
        if is_told.load(Relaxed) {
            return;
        }
        reclaimer.look(Clock.now(), &mut report).unwrap();
        reclaimer.kill_overdue(Clock.now(), &mut report);
        if round.is_multiple_of(8) {
            reclaimer.tend(&mut report).unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn told_to_stop() -> Arc<AtomicBool> {
    let is_told = Arc::new(AtomicBool::new(false));
    let teller = Arc::clone(&is_told);
    std::thread::spawn(move || {
        passes::told();
        teller.store(true, Relaxed);
    });
    is_told
}

fn open(directory: &str) -> Arc<PassHost> {
    PassHost::open(Path::new(directory), Some(GEOMETRY)).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Record {
    About,
    Accepted,
    Refused,
    Cancelling,
    Returned,
    /// Returned with an end that is not the closure's.
    Wrong,
    Poisoned,
    /// Submits nothing any more.
    Quiet,
}

const RECORDS: [Record; 8] = [
    Record::About,
    Record::Accepted,
    Record::Refused,
    Record::Cancelling,
    Record::Returned,
    Record::Wrong,
    Record::Poisoned,
    Record::Quiet,
];

/// The pipe to the ledger.
struct Pen(File);

impl Pen {
    /// One write of fewer bytes than a pipe keeps together.
    fn write(&mut self, record: Record, token: u64) {
        let mut bytes = [record as u8; 9];
        bytes[1..].copy_from_slice(&token.to_le_bytes());
        self.0.write_all(&bytes).unwrap();
    }
}

/// Submits tokens and collects their ends. When it is told to, submits no more; then it is killed.
fn client(words: &[&str]) {
    let [directory, name, first, seed] = words else { panic!("four words") };
    let host = open(directory);
    let options =
        ClientOptions { name: (*name).into(), no_worker_after: NEVER, ..ClientOptions::default() };
    let client = PassClient::join(&host, options).unwrap();
    let mut pen = Pen(File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap()));
    let mut rng = Rng::with_seed(seed.parse().unwrap());
    let is_told = told_to_stop();
    let mut token: u64 = first.parse().unwrap();
    let mut is_quiet = false;
    loop {
        if is_told.load(Relaxed) {
            if !is_quiet {
                pen.write(Record::Quiet, 0);
                is_quiet = true;
            }
        } else {
            for _ in 0..rng.u32(0..=client.room()) {
                let Expected { closure, args, is_low, is_cancelled, deadline } =
                    Expected::of(token);
                let mut pass = Pass::named(closure, args).tag(token).attempts(63);
                pass.deadline = deadline;
                let pass = if is_low { pass.low_priority() } else { pass };
                pen.write(Record::About, token);
                match client.submit(&pass) {
                    Ok(id) => {
                        pen.write(Record::Accepted, token);
                        if is_cancelled {
                            pen.write(Record::Cancelling, token);
                            client.cancel(id);
                        }
                    }
                    Err(SubmitError::Busy(_)) => pen.write(Record::Refused, token),
                    Err(error) => panic!("{error}"),
                }
                token += 1;
            }
        }
        if client.poll(|end| pen.write(record(&end), end.tag)) == 0 {
            std::thread::yield_now();
        }
    }
}

fn record(end: &Completion<'_>) -> Record {
    match &end.outcome {
        PassOutcome::Poisoned => Record::Poisoned,
        outcome if Expected::of(end.tag).is(outcome) => Record::Returned,
        _ => Record::Wrong,
    }
}

/// What the ledger knows of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    is_accepted: bool,
    is_refused: bool,
    /// Its client was killed between "about" and "accepted".
    is_in_doubt: bool,
    returned: u32,
    /// Returns that were the last record of a killed client.
    last_words: u32,
    /// Its client was killed after it had begun to take it back, and before it was told the end.
    may_be_cancelled: bool,
}

/// The book of one client's name.
#[derive(Debug, Default)]
struct Ledger {
    tokens: HashMap<u64, Entry>,
    /// What the present client has begun to take back.
    cancelling: Vec<u64>,
    last: Option<(Record, u64)>,
    wrong: u64,
    poisoned: u64,
    is_quiet: bool,
}

impl Ledger {
    fn note(&mut self, record: Record, token: u64) {
        if record == Record::Quiet {
            self.is_quiet = true;
            return;
        }
        self.last = Some((record, token));
        let entry = self.tokens.entry(token).or_default();
        match record {
            Record::About => entry.is_in_doubt = true,
            Record::Accepted => (entry.is_accepted, entry.is_in_doubt) = (true, false),
            Record::Refused => (entry.is_refused, entry.is_in_doubt) = (true, false),
            Record::Returned | Record::Wrong | Record::Poisoned => entry.returned += 1,
            Record::Cancelling => self.cancelling.push(token),
            Record::Quiet => {}
        }
        self.wrong += u64::from(record == Record::Wrong);
        self.poisoned += u64::from(record == Record::Poisoned);
    }

    /// The client was killed.
    fn close(&mut self) {
        self.is_quiet = false;
        for token in self.cancelling.drain(..) {
            let entry = self.tokens.entry(token).or_default();
            entry.may_be_cancelled |= entry.returned == 0;
        }
        if let Some((Record::Returned | Record::Wrong | Record::Poisoned, token)) = self.last.take()
        {
            self.tokens.entry(token).or_default().last_words += 1;
        }
    }

    fn next_token(&self, client: usize) -> u64 {
        let first = (client as u64 + 1) << 48;
        let own = |token: &&u64| **token >> 48 == first >> 48;
        self.tokens.keys().filter(own).max().map_or(first, |last| last + 1)
    }

    /// Tokens that break what is claimed, and how often a return came twice as it may.
    fn audit(&self, client: usize) -> (Vec<(u64, Entry)>, u64) {
        let mut faults = Vec::new();
        let mut repeated = 0;
        for (&token, &entry) in &self.tokens {
            let least = u32::from(entry.is_accepted && !entry.may_be_cancelled);
            let most = u32::from(entry.is_accepted || entry.is_in_doubt);
            let is_right = token >> 48 == client as u64 + 1
                && entry.returned >= least
                && entry.returned <= most + entry.last_words;
            if !is_right {
                faults.push((token, entry));
            }
            repeated += u64::from(entry.returned.saturating_sub(1));
        }
        (faults, repeated)
    }
}

/// A process that is started anew whenever it ends.
struct Place {
    /// While it can be signalled.
    running: Mutex<Option<(Pid, ChildStdin)>>,
    ledger: Mutex<Ledger>,
}

/// What all places share.
struct Stage {
    directory: PathBuf,
    seed: u64,
    is_over: AtomicBool,
    is_quiet: AtomicBool,
    /// Ends that nobody had caused.
    unexpected: Mutex<Vec<String>>,
}

impl Stage {
    /// Keeps a place filled until all is over.
    fn keep(&self, place: &Place, role: &str, index: usize) {
        let directory = self.directory.to_str().unwrap();
        for life in 0_u64.. {
            if self.is_over.load(SeqCst) {
                return;
            }
            let seed = (self.seed ^ life << 8 ^ index as u64).to_string();
            let first = place.ledger.lock().unwrap().next_token(index).to_string();
            let name = format!("client-{index}");
            let spin = if index.is_multiple_of(2) { "sleep" } else { "spin" };
            let mut command = match role {
                "client" => passes::command(role, &[directory, &name, &first, &seed]),
                "worker" => passes::command(role, &[directory, spin]),
                _ => passes::command(role, &[directory]),
            };
            let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            let mut started = started.unwrap();
            let pid = Pid::from_raw(started.id() as i32);
            let (stdin, stdout) = (started.stdin.take().unwrap(), started.stdout.take().unwrap());
            *place.running.lock().unwrap() = Some((pid, stdin));
            if role == "client" && self.is_quiet.load(SeqCst) {
                place.tell();
            }
            let mut records = BufReader::with_capacity(1 << 16, stdout);
            let mut bytes = [0; 9];
            loop {
                match records.read_exact(&mut bytes) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                    Err(error) => panic!("{error}"),
                }
                let token = u64::from_le_bytes(bytes[1..].try_into().unwrap());
                place.ledger.lock().unwrap().note(RECORDS[usize::from(bytes[0])], token);
            }
            // Nobody signals a number that may be another's by now.
            let mut running = place.running.lock().unwrap();
            *running = None;
            let status = waitpid(pid, None).unwrap();
            drop(running);
            place.ledger.lock().unwrap().close();
            let is_told = self.is_over.load(SeqCst) && status == WaitStatus::Exited(pid, 0);
            if status != WaitStatus::Signaled(pid, Signal::SIGKILL, false) && !is_told {
                self.unexpected.lock().unwrap().push(format!("{role} {index}: {status:?}"));
            }
        }
    }
}

impl Place {
    fn signal(&self, signal: Signal) -> bool {
        let running = self.running.lock().unwrap();
        running.as_ref().is_some_and(|(pid, _)| kill(*pid, signal).is_ok())
    }

    fn tell(&self) {
        if let Some((_, stdin)) = &mut *self.running.lock().unwrap() {
            // One that has just ended does not hear it; its successor is told.
            let _ = writeln!(stdin, "stop");
        }
    }
}

fn torture() {
    let seconds = std::env::var("MESHWORK_TORTURE_S").map_or(5, |text| text.parse().unwrap());
    let seed = std::env::var("MESHWORK_SEED")
        .map_or_else(|_| fastrand::u64(..), |text| text.parse().unwrap());
    println!("MESHWORK_SEED={seed} MESHWORK_TORTURE_S={seconds}");
    let scratch = tempfile::tempdir().unwrap();
    let host = open(scratch.path().to_str().unwrap());
    let stage = Arc::new(Stage {
        directory: scratch.path().to_owned(),
        seed,
        is_over: AtomicBool::new(false),
        is_quiet: AtomicBool::new(false),
        unexpected: Mutex::default(),
    });
    let roles = [("client", CLIENTS), ("worker", WORKERS), ("reclaimer", RECLAIMERS)];
    let mut places = Vec::new();
    let mut keepers: Vec<JoinHandle<()>> = Vec::new();
    for (role, index) in roles.iter().flat_map(|(role, many)| (0..*many).map(move |i| (*role, i))) {
        let place = Arc::new(Place { running: Mutex::new(None), ledger: Mutex::default() });
        places.push(Arc::clone(&place));
        let stage = Arc::clone(&stage);
        keepers.push(std::thread::spawn(move || stage.keep(&place, role, index)));
    }
    let (kills, stops) = strike(&places, Duration::from_secs(seconds), seed);
    stage.is_quiet.store(true, SeqCst);
    let clients = &places[..CLIENTS];
    clients.iter().for_each(|place| place.tell());
    let begun = Instant::now();
    while !(clients.iter().all(|place| place.ledger.lock().unwrap().is_quiet) && is_empty(&host)) {
        if begun.elapsed() > GRACE {
            println!("not empty after {GRACE:?}: {:#?}", slots(&host));
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    stage.is_over.store(true, SeqCst);
    places[CLIENTS..].iter().for_each(|place| place.tell());
    for client in clients {
        client.signal(Signal::SIGKILL);
    }
    keepers.into_iter().for_each(|keeper| keeper.join().unwrap());
    report(&stage, clients, &host, kills, stops);
}

/// Kills and stops for so long. How often each.
fn strike(places: &[Arc<Place>], time: Duration, seed: u64) -> (u64, u64) {
    let mut rng = Rng::with_seed(seed);
    let begun = Instant::now();
    let (mut kills, mut stops) = (0, 0);
    let mut stopped: Vec<(Instant, usize)> = Vec::new();
    while begun.elapsed() < time {
        std::thread::sleep(Duration::from_micros(rng.u64(500..6_000)));
        let now = Instant::now();
        stopped.retain(|(until, index)| {
            if *until > now {
                return true;
            }
            places[*index].signal(Signal::SIGCONT);
            false
        });
        let index = rng.usize(..places.len());
        if rng.u8(..4) == 0 {
            let until = now + Duration::from_micros(rng.u64(1_000..60_000));
            if places[index].signal(Signal::SIGSTOP) {
                stopped.push((until, index));
                stops += 1;
            }
        } else if places[index].signal(Signal::SIGKILL) {
            kills += 1;
        }
    }
    for place in places {
        place.signal(Signal::SIGCONT);
    }
    (kills, stops)
}

fn slots(host: &PassHost) -> Vec<(u32, SlotWord)> {
    let ring = host.ring();
    (0..ring.layout().slot_count())
        .map(|slot| (slot, ring.word(slot)))
        .filter(|(_, word)| word.state() != Some(SlotState::Free))
        .collect()
}

fn is_empty(host: &PassHost) -> bool {
    slots(host).is_empty()
}

fn report(stage: &Stage, clients: &[Arc<Place>], host: &PassHost, kills: u64, stops: u64) {
    let (mut submitted, mut returned, mut in_doubt, mut refused) = (0, 0, 0, 0);
    let mut cancelled = 0;
    let (mut wrong, mut poisoned, mut repeats, mut faults) = (0, 0, 0, Vec::new());
    for (index, place) in clients.iter().enumerate() {
        let ledger = place.ledger.lock().unwrap();
        let (faulty, repeated) = ledger.audit(index);
        faults.extend(faulty.into_iter().map(|fault| (index, fault)));
        repeats += repeated;
        wrong += ledger.wrong;
        poisoned += ledger.poisoned;
        for entry in ledger.tokens.values() {
            // What was in doubt and returned had been submitted.
            let is_ended = entry.returned > 0 || entry.may_be_cancelled;
            submitted += u64::from(entry.is_accepted || entry.is_in_doubt && is_ended);
            returned += u64::from(is_ended);
            cancelled += u64::from(entry.returned == 0 && entry.may_be_cancelled);
            in_doubt += u64::from(entry.is_in_doubt);
            refused += u64::from(entry.is_refused);
        }
    }
    let header = host.ring().header();
    println!(
        "submitted {submitted} returned {returned} (in doubt {in_doubt}, refused {refused}, \
         taken back by a client that was killed {cancelled}); \
         kills {kills} stops {stops}; requeued {} adopted {} poisoned {poisoned}; \
         told again to a successor {repeats}, duplicates and lost {}, wrong {wrong}",
        header.requeued.load(SeqCst),
        header.adopted.load(SeqCst),
        faults.len(),
    );
    let unexpected = stage.unexpected.lock().unwrap();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    faults.truncate(20);
    assert!(faults.is_empty(), "{faults:#x?}");
    assert_eq!((submitted, wrong, poisoned), (returned, 0, 0));
    assert!(is_empty(host), "{:#?}", slots(host));
}
