//! Passes among processes that die, stop, fork and fill the disk, and on files that are not pass
//! files.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(clippy::zombie_processes, reason = "a worker that is killed leaves its child behind")]

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use meshwork::actors::clock::Clock;
use meshwork::actors::host::pass::{Completion, Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::actors::host::reclaimer::{Heart, ReclaimReport, Reclaimer, ReclaimerOptions};
use meshwork::actors::host::registry::{PassCall, PassRegistry};
use meshwork::actors::host::worker_thread::{WorkerOptions, WorkerThread};
use meshwork::passes::Spin;
use meshwork::protocol::pass::WorkerIndex;
use meshwork::protocol::pass::layout::Geometry;
use meshwork::protocol::time::Instant;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

mod passes;

use passes::{Process, collect, join, open, open_for, tell, told, until};

fn main() -> ExitCode {
    let tests: &[passes::Named<fn()>] = &[
        ("what_a_killed_worker_had_claimed_runs_elsewhere", killed_worker),
        ("a_child_that_a_closure_started_does_not_keep_the_dead_alive", child_of_a_closure),
        ("a_child_that_a_closure_forked_does_not_keep_the_dead_alive", forked_and_stays),
        ("a_child_that_a_closure_forked_completes_nothing", forked_and_returns),
        ("a_forked_child_opens_the_passes_anew", forked_and_reopens),
        ("three_hundred_simultaneous_starts_make_one_file", simultaneous_starts),
        ("a_full_filesystem_is_an_error_and_harms_nothing_under_way", full_filesystem),
        ("a_filesystem_without_room_for_the_file_is_an_error", no_room_for_the_file),
        ("a_read_only_filesystem_is_an_error", read_only_filesystem),
        ("what_is_no_pass_file_is_an_error_that_names_it", not_a_pass_file),
        ("a_file_of_another_boot_is_replaced", another_boot),
        ("a_directory_that_others_may_write_is_refused", writable_by_others),
        ("a_directory_or_file_of_another_user_is_refused", another_users),
        ("a_lock_file_that_was_removed_is_noticed", removed_lock_file),
        ("a_file_of_another_boot_that_somebody_holds_is_refused", another_boot_in_use),
        ("a_filesystem_without_fallocate_is_refused", no_fallocate),
        ("a_limit_on_the_size_of_files_is_an_error", limited_file_size),
        ("a_file_in_the_directorys_place_is_an_error", file_for_a_directory),
        ("a_panic_that_panics_when_it_is_dropped_is_a_result", bomb),
        ("numbers_that_no_file_is_made_for_are_refused", impossible_numbers),
        ("a_stopped_worker_is_not_called_dead", stopped_worker),
        ("a_long_pass_is_not_called_dead", long_pass),
        ("a_hung_closures_process_is_killed_and_its_pass_runs_elsewhere", hung_closure),
        ("two_hundred_workers_that_died_leave_their_rows_free", dead_idle_workers),
        ("a_burial_wakes_each_sleeper_once_at_most", bounded_wakes),
        ("a_panic_is_a_result_and_the_worker_lives_on", panicking_closure),
        ("a_closure_registers_a_closure", closure_that_registers),
        ("a_worker_takes_only_what_it_has_a_closure_for", different_registries),
        ("two_clients_results_never_mix", two_clients),
        ("what_was_submitted_is_finished_after_all_processes_died", all_died),
        ("old_answers_never_come_under_new_tokens", old_answers),
        ("a_client_is_not_told_what_a_dead_one_of_another_name_had_asked", strangers_leftovers),
        ("nor_is_the_client_after_it", strangers_leftovers_later),
        ("a_successor_waits_for_who_tends_its_predecessors_row", tended_row),
        ("twenty_thousand_results_wait_until_they_are_collected", uncollected),
        ("a_pass_that_kills_its_workers_is_poisoned_and_alone", poison),
    ];
    passes::main(
        tests,
        &[
            ("worker", worker),
            ("starter", starter),
            ("asker", asker),
            ("forker", forker),
            ("limited", limited),
        ],
    )
}

/// The closures of the worker processes.
fn register(registry: &PassRegistry, name: &'static str) {
    let echo = |call: &PassCall<'_>| Ok::<_, String>(call.args.to_vec());
    let done = match name {
        "hold" => registry.register(name, move |call| {
            tell("holding");
            told();
            echo(call)
        }),
        "hang" => registry.register(name, move |call| {
            if call.attempt == 0 {
                park();
            }
            echo(call)
        }),
        "panic" => registry.register(name, |_| -> Result<Vec<u8>, String> { panic!("too few") }),
        "abort" => {
            registry.register(name, |_| -> Result<Vec<u8>, String> { std::process::abort() })
        }
        "bomb" => registry.register(name, |_| -> Result<Vec<u8>, String> {
            struct Bomb;
            impl Drop for Bomb {
                fn drop(&mut self) {
                    std::panic::panic_any(Bomb);
                }
            }
            std::panic::panic_any(Bomb)
        }),
        "teach" => registry.register(name, move |call| {
            call.registry.register("taught", echo).map_err(|error| error.to_string())?;
            echo(call)
        }),
        "start" => registry.register(name, move |call| {
            if call.attempt == 0 {
                let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
                tell(&child.id().to_string());
                told();
            }
            echo(call)
        }),
        "fork" => registry.register(name, move |call| {
            let stays = call.args == b"stays";
            if call.attempt == 0 {
                // Forks; the parent ends at once, and the child goes on from here.
                nix::unistd::daemon(true, true).unwrap();
                tell(&std::process::id().to_string());
                if stays {
                    park();
                }
                return Ok(b"of the child".to_vec());
            }
            echo(call)
        }),
        "whose" => registry.register(name, |_| Ok::<_, String>(std::process::id().to_string())),
        _ => registry.register(name, echo),
    };
    done.unwrap();
}

/// Never returns.
fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// A worker that has the closures which its words after the directory name.
fn worker(words: &[&str]) {
    std::panic::set_hook(Box::new(|_| {}));
    let host = PassHost::open(Path::new(words[0]), None).unwrap();
    let registry = PassRegistry::new();
    let worker = WorkerThread::spawn(&host, registry.clone(), &WorkerOptions::default()).unwrap();
    tell(&format!("worker {}", worker.index().0));
    // After that, so that no closure tells anything before.
    for name in &words[1..] {
        register(&registry, name.to_string().leak());
    }
    let heart = Heart::new(&host);
    loop {
        heart.beat();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A worker process that has joined.
fn start_worker(directory: &Path, closures: &[&str]) -> Process {
    let words = [&[directory.to_str().unwrap()], closures].concat();
    let process = Process::start("worker", &words);
    assert!(process.next_line().unwrap().starts_with("worker "));
    process
}

/// Looks after the dead until something holds.
fn tend_until(host: &Arc<PassHost>, what: &str, mut holds: impl FnMut() -> bool) -> ReclaimReport {
    let mut reclaimer = Reclaimer::new(host, ReclaimerOptions::default());
    let mut report = ReclaimReport::default();
    until(what, || {
        reclaimer.tend(&mut report).unwrap();
        reclaimer.kill_overdue(Clock.now(), &mut report);
        holds()
    });
    report
}

/// The next completion, with someone who looks after the dead.
fn collect_tended(
    host: &Arc<PassHost>,
    client: &PassClient,
) -> (Completion<'static>, ReclaimReport) {
    let mut one = None;
    let report = tend_until(host, "a completion", || {
        client.poll(|end| assert!(one.replace(end.into_owned()).is_none()));
        one.is_some()
    });
    (one.unwrap(), report)
}

fn returned(bytes: &[u8]) -> PassOutcome<'static> {
    PassOutcome::Returned(bytes.to_vec().into())
}

fn row_is_free(host: &PassHost, row: u16) -> bool {
    host.ring().worker(WorkerIndex(row)).holder.epoch.load(SeqCst).is_multiple_of(2)
}

fn killed_worker() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut first = start_worker(directory.path(), &["hold"]);
    let pass = client.submit(&Pass::named("hold", b"x".to_vec()).tag(7)).unwrap();
    first.expect("holding");
    first.kill();
    let mut second = start_worker(directory.path(), &["hold"]);
    second.expect("holding");
    second.tell("on");
    let end = collect(&client, 1).remove(0);
    assert_eq!((end.pass, end.tag, end.attempt, end.outcome), (pass, 7, 1, returned(b"x")));
    assert_eq!(host.ring().header().requeued.load(SeqCst), 1);
}

fn child_of_a_closure() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut first = start_worker(directory.path(), &["start"]);
    client.submit(&Pass::named("start", b"x".to_vec())).unwrap();
    let child = Orphan::told_by(&first);
    first.kill();
    let _second = start_worker(directory.path(), &["start"]);
    let (end, _) = collect_tended(&host, &client);
    assert_eq!((end.attempt, end.outcome), (1, returned(b"x")));
    assert!(child.is_alive());
}

fn forked_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut first = start_worker(directory.path(), &["fork"]);
    client.submit(&Pass::named("fork", b"stays".to_vec())).unwrap();
    let child = Orphan::told_by(&first);
    first.wait();
    tend_until(&host, "the row is free", || row_is_free(&host, 0));
    assert_eq!(host.ring().header().requeued.load(SeqCst), 1);
    let _second = start_worker(directory.path(), &["fork"]);
    let end = collect(&client, 1).remove(0);
    assert_eq!((end.attempt, end.outcome), (1, returned(b"stays")));
    assert!(child.is_alive());
}

fn forked_and_returns() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut first = start_worker(directory.path(), &["fork"]);
    client.submit(&Pass::named("fork", b"returns".to_vec())).unwrap();
    let child = Orphan::told_by(&first);
    first.wait();
    until("the child has returned and ended", || !child.is_alive());
    assert_eq!(client.poll(|end| panic!("{end:?}")), 0);
    let _second = start_worker(directory.path(), &["fork"]);
    let (end, _) = collect_tended(&host, &client);
    assert_eq!((end.attempt, end.outcome), (1, returned(b"returns")));
}

/// Opens, forks, and goes on in the child as an error would tell it to.
fn forker(words: &[&str]) {
    let host = PassHost::open(Path::new(words[0]), None).unwrap();
    let client = join(&host, "before");
    nix::unistd::daemon(true, true).unwrap();
    let error = client.submit(&Pass::named("echo", vec![])).unwrap_err();
    assert!(error.to_string().ends_with("open them here anew"), "{error}");
    // Most probably where the parent's mapping was, which the child does not have.
    let anew = PassHost::open(Path::new(words[0]), None).unwrap();
    drop(client);
    drop(host);
    let client = join(&anew, "after");
    client.submit(&Pass::named("echo", b"x".to_vec())).unwrap();
    assert_eq!(collect(&client, 1)[0].outcome, returned(b"x"));
    tell("it works");
}

fn forked_and_reopens() {
    let directory = tempfile::tempdir().unwrap();
    let _host = open(directory.path());
    let _worker = start_worker(directory.path(), &["echo"]);
    let forker = Process::start("forker", &[directory.path().to_str().unwrap()]);
    assert_eq!(forker.next_line().as_deref(), Some("it works"));
}

/// A process that a worker of the test has started, and left.
struct Orphan(Pid);

impl Orphan {
    fn told_by(worker: &Process) -> Self {
        Self(Pid::from_raw(worker.next_line().unwrap().parse().unwrap()))
    }

    fn is_alive(&self) -> bool {
        // One that has ended may wait for whoever inherited it.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        state.is_some_and(|state| !"ZX".contains(state))
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        if self.is_alive() {
            kill(self.0, Signal::SIGKILL).unwrap();
        }
    }
}

/// Opens when it is told to, and says which file it has.
fn starter(words: &[&str]) {
    tell("ready");
    told();
    let host = PassHost::open(Path::new(words[0]), None).unwrap();
    let instance = host.ring().file().unwrap().header().instance_id;
    // Touches all that has memory.
    let rows = host.ring().workers().iter().filter(|row| row.holder.epoch.load(SeqCst) == 0);
    assert_eq!(rows.count(), 64);
    tell(&format!("{instance:x?}"));
}

fn simultaneous_starts() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("passes");
    let words = [directory.to_str().unwrap()];
    let mut starters: Vec<_> = (0..300).map(|_| Process::start("starter", &words)).collect();
    starters.iter().for_each(|starter| starter.expect("ready"));
    starters.iter_mut().for_each(|starter| starter.tell("go"));
    let instances: BTreeSet<_> = starters.iter().map(Process::next_line).collect();
    for starter in &mut starters {
        let pid = starter.pid();
        assert_eq!(starter.wait(), WaitStatus::Exited(pid, 0));
    }
    assert_eq!(instances.len(), 1, "{instances:?}");
    assert_eq!(files(&directory), ["passes.lock", "passes.map"]);
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o7777, 0o700);
    let mode = |name| fs::metadata(directory.join(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("passes.map"), mode("passes.lock")), (0o600, 0o600));
}

fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A small filesystem of its own, gone when dropped.
struct Mounted(tempfile::TempDir);

impl Mounted {
    /// `None` where this user may not mount.
    fn of_bytes(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let options = format!("size={bytes},mode=0700");
        let flags = MsFlags::empty();
        match mount(Some("none"), directory.path(), Some("tmpfs"), flags, Some(options.as_str())) {
            Ok(()) => Some(Self(directory)),
            Err(error) => {
                println!("SKIPPED: mounting a tmpfs needs root: {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}

fn full_filesystem() {
    let Some(mounted) = Mounted::of_bytes(8 << 20) else { return };
    let host = open(mounted.path());
    let client = join(&host, "client");
    let pattern = |tag: u64| -> Vec<u8> { (0..65_536).map(|n| (n * 7 + tag) as u8).collect() };
    for tag in 0..3 {
        client.submit(&Pass::named("echo", pattern(tag)).tag(tag)).unwrap();
    }
    // Takes what is left, to the last page.
    let filler = fs::File::create(mounted.path().join("filler")).unwrap();
    let fill = || {
        use std::io::Write;
        let page = [1; 4_096];
        (&filler).write_all(&page).is_ok()
    };
    while fill() {}
    let mut submitted = 3;
    let error = loop {
        match client.submit(&Pass::named("echo", pattern(submitted)).tag(submitted)) {
            Ok(_) => submitted += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SubmitError::NoSpace(_)) && error.is_retryable(), "{error:?}");
    let text = "no memory for the pass's bytes: No space left on device (os error 28)";
    assert_eq!(error.to_string(), text);
    // The worker joins and works on a full disk.
    let mut worker = start_worker(mounted.path(), &["echo"]);
    let mut ends = collect(&client, submitted as usize);
    ends.sort_by_key(|end| end.tag);
    for (tag, end) in (0..).zip(&ends) {
        assert!(end.tag == tag && end.outcome == returned(&pattern(tag)), "{tag}");
    }
    // Slots that have their memory serve on, and so do others when there is room again.
    client.submit(&Pass::named("echo", pattern(9)).tag(9)).unwrap();
    assert!(collect(&client, 1)[0].outcome == returned(&pattern(9)));
    drop(filler);
    fs::remove_file(mounted.path().join("filler")).unwrap();
    for tag in 0..20 {
        client.submit(&Pass::named("echo", pattern(tag)).tag(tag)).unwrap();
    }
    assert_eq!(collect(&client, 20).len(), 20);
    let pid = worker.pid();
    assert_eq!(worker.kill(), WaitStatus::Signaled(pid, Signal::SIGKILL, false));
}

fn no_room_for_the_file() {
    let Some(mounted) = Mounted::of_bytes(64 << 10) else { return };
    let error = PassHost::open(mounted.path(), None).unwrap_err().to_string();
    let new = mounted.path().join("passes.new");
    let text = format!("cannot write {}: No space left on device (os error 28)", new.display());
    assert_eq!(error, text);
    assert_eq!(files(mounted.path()), ["passes.lock"]);
}

fn read_only_filesystem() {
    let Some(mounted) = Mounted::of_bytes(8 << 20) else { return };
    drop(open(mounted.path()));
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, mounted.path(), None::<&str>, flags, None::<&str>).unwrap();
    let lock = mounted.path().join("passes.lock");
    let error = PassHost::open(mounted.path(), None).unwrap_err().to_string();
    let text = format!("cannot open {}: Read-only file system (os error 30)", lock.display());
    assert_eq!(error, text);
    let below = mounted.path().join("below");
    let error = PassHost::open(&below, None).unwrap_err().to_string();
    let text = format!(
        "cannot make the directory {}: Read-only file system (os error 30)",
        below.display()
    );
    assert_eq!(error, text);
}

/// A directory with a pass file, and the file's bytes.
fn made() -> (tempfile::TempDir, std::path::PathBuf, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()));
    let path = directory.path().join("passes.map");
    let bytes = fs::read(&path).unwrap();
    (directory, path, bytes)
}

fn not_a_pass_file() {
    let (directory, path, good) = made();
    let whole = good.len();
    let mut version = good.clone();
    version[8] = 9;
    let mut build = good.clone();
    build[16] ^= 1;
    let mut numbers = good.clone();
    numbers[68] = 63;
    let mut random = vec![0; 100_000];
    fastrand::Rng::with_seed(1).fill(&mut random);
    let cut =
        |to: usize| format!("the file has {to} bytes where {whole} are needed: it was cut short");
    let cases = [
        (
            "empty",
            vec![],
            "the file has 0 bytes where 4096 are needed: it was cut short".to_owned(),
        ),
        (
            "one byte",
            vec![1],
            "the file has 1 bytes where 4096 are needed: it was cut short".into(),
        ),
        ("cut after its header", good[..4_096].to_vec(), cut(4_096)),
        ("cut by a byte", good[..whole - 1].to_vec(), cut(whole - 1)),
        ("random", random, "the file is no pass file: it does not begin with the magic".into()),
        (
            "not finished",
            vec![0; whole],
            "the file is no pass file: it does not begin with the magic".into(),
        ),
        ("version", version, "the file has layout 9, this program reads layout 1".into()),
        (
            "build",
            build,
            "the file's records are laid out differently: it was made by another build".into(),
        ),
        (
            "numbers",
            numbers,
            "the file's header is damaged: workers must be a multiple of 64 up to 1024, not 63"
                .into(),
        ),
    ];
    for (what, bytes, said) in cases {
        fs::write(&path, &bytes).unwrap();
        let error = PassHost::open(directory.path(), None).unwrap_err().to_string();
        let ending = "; stop every process that uses it, and remove it";
        assert_eq!(error, format!("{}: {said}{ending}", path.display()), "{what}");
        assert!(fs::read(&path).unwrap() == bytes, "{what}: the file was changed");
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let error = PassHost::open(directory.path(), None).unwrap_err().to_string();
    assert_eq!(error, format!("cannot open {}: Is a directory (os error 21)", path.display()));
}

fn another_boot() {
    let (directory, path, mut bytes) = made();
    bytes[32] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let host = open(directory.path());
    assert_eq!(files(directory.path()), ["passes.lock", "passes.map"]);
    let new = fs::read(&path).unwrap();
    assert_eq!(new[32] ^ 1, bytes[32]);
    assert_ne!(new[48..64], bytes[48..64], "another instance");
    let client = join(&host, "client");
    let _worker = start_worker(directory.path(), &["echo"]);
    client.submit(&Pass::named("echo", b"x".to_vec())).unwrap();
    assert_eq!(collect(&client, 1)[0].outcome, returned(b"x"));
}

fn another_users() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: giving a file away needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    drop(PassHost::open(path, None).unwrap());
    for given in [path.join("passes.map"), path.to_owned()] {
        std::os::unix::fs::chown(&given, Some(65_534), None).unwrap();
        let error = PassHost::open(path, None).unwrap_err().to_string();
        let text = "belongs to user 65534, and this process to another: choose a directory of your \
                    own";
        assert_eq!(error, format!("{} {text}", given.display()));
    }
    // Looking disturbs nobody.
    PassHost::look(path).unwrap();
}

fn removed_lock_file() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let worker = start_worker(directory.path(), &["echo"]);
    let locks = directory.path().join("passes.lock");
    fs::remove_file(&locks).unwrap();
    let text = format!(
        "{} was removed while processes had it open: stop every process of the directory, and remove \
         passes.map too",
        locks.display()
    );
    assert_eq!(PassHost::open(directory.path(), None).unwrap_err().to_string(), text);
    assert_eq!(PassHost::look(directory.path()).unwrap_err().to_string(), text);
    // Those who were there go on.
    client.submit(&Pass::named("echo", b"x".to_vec())).unwrap();
    assert_eq!(collect(&client, 1)[0].outcome, returned(b"x"));
    drop((client, host, worker));
    fs::remove_file(&locks).unwrap();
    fs::remove_file(directory.path().join("passes.map")).unwrap();
    open(directory.path());
}

fn another_boot_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let worker = {
        let _host = open(directory.path());
        start_worker(directory.path(), &["echo"])
    };
    let path = directory.path().join("passes.map");
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 32).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 32).unwrap();
    let error = PassHost::open(directory.path(), None).unwrap_err().to_string();
    let text = "is in use by a process of another boot: do machines share the directory? Choose one of \
                this machine alone";
    assert_eq!(error, format!("{} {text}", path.display()));
    drop(worker);
    // Nobody has it any more.
    until("it is replaced", || PassHost::open(directory.path(), None).is_ok());
}

fn limited(words: &[&str]) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    setrlimit(Resource::Fsize, limit).unwrap();
    tell(&PassHost::open(Path::new(words[0]), None).unwrap_err().to_string());
}

fn limited_file_size() {
    let directory = tempfile::tempdir().unwrap();
    let limited = Process::start("limited", &[directory.path().to_str().unwrap()]);
    let error = limited.next_line().unwrap();
    let text =
        "the limit on the size of files (ulimit -f) is 1048576 bytes, and 1076162560 are needed";
    assert!(error.ends_with(text), "{error}");
    assert_eq!(files(directory.path()), ["passes.lock"]);
}

fn file_for_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = PassHost::open(&file, None).unwrap_err().to_string();
    assert_eq!(error, format!("{} is not a directory", file.display()));
}

fn bomb() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let worker = start_worker(directory.path(), &["bomb", "whose"]);
    client.submit(&Pass::named("bomb", vec![])).unwrap();
    let said = PassOutcome::Panicked("a panic without a text".into());
    assert_eq!(collect(&client, 1)[0].outcome, said);
    client.submit(&Pass::named("whose", vec![])).unwrap();
    let pid = worker.pid().to_string();
    assert_eq!(collect(&client, 1)[0].outcome, returned(pid.as_bytes()));
}

fn no_fallocate() {
    let directory = tempfile::tempdir().unwrap();
    if let Err(error) =
        mount(Some("none"), directory.path(), Some("ramfs"), MsFlags::empty(), Some("mode=700"))
    {
        println!("SKIPPED: mounting a ramfs needs root: {error}");
        return;
    }
    let error = PassHost::open(directory.path(), None).map(drop);
    umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("its filesystem has no fallocate: choose a directory"), "{error}");
}

fn writable_by_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for mode in [0o777, 0o720, 0o702, 0o1777] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let error = PassHost::open(path, None).unwrap_err().to_string();
        let text = format!(
            "{} may be written by others (mode {mode:o}): chmod go-w it, or choose another",
            path.display(),
        );
        assert_eq!(error, text);
    }
    assert_eq!(files(path), Vec::<String>::new());

    fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
    drop(PassHost::open(path, None).unwrap());
    let file = path.join("passes.map");
    fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let error = PassHost::open(path, None).unwrap_err().to_string();
    let text = "may be written by others (mode 666): chmod go-w it, or choose another";
    assert_eq!(error, format!("{} {text}", file.display()));
}

fn impossible_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let geometry = Geometry { slots_per_client: 192, ..Geometry::default() };
    let error = PassHost::open(directory.path(), Some(geometry)).unwrap_err().to_string();
    assert_eq!(error, "slots_per_client must be a power of two from 64 to 4096, not 192");
}

/// Looks through ten minutes of an observer's time, in steps of a tenth of a second.
fn look_for_ten_minutes(host: &Arc<PassHost>) -> ReclaimReport {
    let mut reclaimer = Reclaimer::new(host, ReclaimerOptions::default());
    let mut report = ReclaimReport::default();
    for tenth in 0..6_000 {
        reclaimer.look(Instant::from_micros(tenth * 100_000), &mut report).unwrap();
    }
    reclaimer.tend(&mut report).unwrap();
    report
}

fn stopped_worker() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut worker = start_worker(directory.path(), &["hold"]);
    client.submit(&Pass::named("hold", b"x".to_vec())).unwrap();
    worker.expect("holding");
    worker.signal(Signal::SIGSTOP);
    let stopped = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
    waitid(Id::Pid(worker.pid()), stopped).unwrap();
    let report = look_for_ten_minutes(&host);
    // Its heart and the client's stood still for two thousand graces.
    assert!(report.probed >= 2_000, "{report:?}");
    assert_eq!((report.lost.len(), report.clients_lost), (0, 0));
    assert_eq!(host.ring().header().requeued.load(SeqCst), 0);
    worker.signal(Signal::SIGCONT);
    worker.tell("on");
    let end = collect(&client, 1).remove(0);
    assert_eq!((end.attempt, end.outcome), (0, returned(b"x")));
}

fn long_pass() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut worker = start_worker(directory.path(), &["hold"]);
    let mut other = start_worker(directory.path(), &["hold"]);
    client.submit(&Pass::named("hold", b"x".to_vec())).unwrap();
    until("one holds", || [&worker, &other].iter().any(|one| one.lines().next().is_some()));
    let report = look_for_ten_minutes(&host);
    assert_eq!(report.lost, []);
    assert_eq!(host.ring().header().requeued.load(SeqCst), 0);
    worker.tell("on");
    other.tell("on");
    let end = collect(&client, 1).remove(0);
    assert_eq!((end.attempt, end.outcome), (0, returned(b"x")));
}

fn hung_closure() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut first = start_worker(directory.path(), &["hang"]);
    let pass = Pass::named("hang", b"x".to_vec()).deadline(Duration::from_millis(20));
    client.submit(&pass).unwrap();
    until("it hangs", || host.ring().worker(WorkerIndex(0)).current().load(SeqCst) != 0);
    let _second = start_worker(directory.path(), &["hang"]);
    let (end, report) = collect_tended(&host, &client);
    assert_eq!((end.attempt, end.outcome), (1, returned(b"x")));
    let killed: BTreeSet<_> = report.killed.iter().map(|seen| seen.process.pid).collect();
    let pid = first.pid();
    assert_eq!(killed, BTreeSet::from([pid.as_raw() as u32]));
    assert_eq!(first.wait(), WaitStatus::Signaled(pid, Signal::SIGKILL, false));
    assert_eq!(report.hung, []);
}

fn dead_idle_workers() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    for _ in 0..200 {
        start_worker(directory.path(), &["echo"]).kill();
    }
    // Nobody has looked after them, and there are 64 rows.
    let client = join(&host, "client");
    let _worker = start_worker(directory.path(), &["echo"]);
    client.submit(&Pass::named("echo", b"x".to_vec())).unwrap();
    assert_eq!(collect(&client, 1)[0].outcome, returned(b"x"));
    let mut rest: Vec<_> = (0..63).map(|_| start_worker(directory.path(), &["echo"])).collect();
    for worker in &mut rest {
        worker.kill();
    }
    tend_until(&host, "63 rows are free", || (1..64).all(|row| row_is_free(&host, row)));
}

fn bounded_wakes() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let options = WorkerOptions { spin: Spin::Never, ..WorkerOptions::default() };
    let _workers: Vec<_> = (0..60)
        .map(|_| WorkerThread::spawn(&host, PassRegistry::new(), &options).unwrap())
        .collect();
    let wakes = || -> u64 {
        let rows = host.ring().workers().iter();
        rows.map(|row| u64::from(row.wake_word().load(SeqCst))).sum()
    };
    for _ in 0..20 {
        let row = WorkerIndex(63);
        let lock = host.lock_worker(row).unwrap().unwrap();
        let before = wakes();
        host.bury_worker(row, &lock);
        let woken = wakes() - before;
        assert!(woken <= 64, "{woken} wakes of 60 workers");
    }
}

fn panicking_closure() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let worker = start_worker(directory.path(), &["panic", "whose"]);
    for _ in 0..100 {
        client.submit(&Pass::named("panic", vec![])).unwrap();
        assert_eq!(collect(&client, 1)[0].outcome, PassOutcome::Panicked("too few".into()));
    }
    client.submit(&Pass::named("whose", vec![])).unwrap();
    let pid = worker.pid().to_string();
    assert_eq!(collect(&client, 1)[0].outcome, returned(pid.as_bytes()));
}

fn closure_that_registers() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let _worker = start_worker(directory.path(), &["teach"]);
    // Waits for its closure already.
    client.submit(&Pass::named("taught", b"y".to_vec()).tag(2)).unwrap();
    client.submit(&Pass::named("teach", b"x".to_vec()).tag(1)).unwrap();
    let mut ends = collect(&client, 2);
    ends.sort_by_key(|end| end.tag);
    let ends: Vec<_> = ends.into_iter().map(|end| (end.tag, end.outcome)).collect();
    assert_eq!(ends, [(1, returned(b"x")), (2, returned(b"y"))]);
}

fn different_registries() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let options = ClientOptions {
        name: "client".into(),
        no_worker_after: Duration::from_millis(150),
        ..ClientOptions::default()
    };
    let client = PassClient::join(&host, options).unwrap();
    let left = start_worker(directory.path(), &["whose"]);
    let _right = start_worker(directory.path(), &["echo"]);
    for _ in 0..200 {
        client.submit(&Pass::named("whose", vec![]).tag(1)).unwrap();
        client.submit(&Pass::named("echo", b"x".to_vec()).tag(2)).unwrap();
        for end in collect(&client, 2) {
            let pid = left.pid().to_string();
            let expected = if end.tag == 1 { pid.as_bytes() } else { b"x" };
            assert_eq!(end.outcome, returned(expected));
        }
    }
    client.submit(&Pass::named("nobody's", vec![]).tag(3)).unwrap();
    assert_eq!(collect(&client, 1)[0].outcome, PassOutcome::NoWorker);
}

/// Asks the same under the same tags as others do, but with its own name in the arguments; tells how
/// many answers were its own. With `and dies`, tells so after it has submitted, and collects nothing.
fn asker(words: &[&str]) {
    let host = PassHost::open(Path::new(words[0]), None).unwrap();
    let name = words[1];
    let client = join(&host, name);
    let pass = |tag: u64| Pass::named("echo", format!("{name} {tag}").into_bytes()).tag(tag);
    if words.get(2) == Some(&"and dies") {
        for tag in 0..10 {
            client.submit(&pass(tag)).unwrap();
        }
        tell("submitted");
        told();
    }
    let (mut next, mut right) = (0, 0);
    while right < 5_000 {
        while next < 5_000 && client.submit(&pass(next)).is_ok() {
            next += 1;
        }
        client.poll(|end| {
            assert_eq!(end.outcome, returned(format!("{name} {}", end.tag).as_bytes()));
            right += 1;
        });
    }
    assert_eq!(client.poll(|end| panic!("{end:?}")), 0);
    tell("5000 right");
}

fn two_clients() {
    let directory = tempfile::tempdir().unwrap();
    let _host = open(directory.path());
    let words = |name| [directory.path().to_str().unwrap(), name];
    let _workers = [0; 2].map(|_| start_worker(directory.path(), &["echo"]));
    let askers = [Process::start("asker", &words("one")), Process::start("asker", &words("two"))];
    askers.iter().for_each(|asker| asker.expect("5000 right"));
}

/// A client process submits ten passes and is killed.
fn ask_and_die(directory: &Path, name: &str) {
    let words = [directory.to_str().unwrap(), name, "and dies"];
    let mut asker = Process::start("asker", &words);
    asker.expect("submitted");
    asker.kill();
}

fn assert_answers(ends: &[Completion<'_>], name: &str) {
    let mut answers: Vec<_> = ends.iter().map(|end| (end.tag, end.outcome.clone())).collect();
    answers.sort_by_key(|(tag, _)| *tag);
    let expected: Vec<_> =
        (0..10).map(|tag| (tag, returned(format!("{name} {tag}").as_bytes()))).collect();
    assert_eq!(answers, expected);
}

fn all_died() {
    let directory = tempfile::tempdir().unwrap();
    open(directory.path());
    let mut worker = start_worker(directory.path(), &["hold"]);
    ask_and_die(directory.path(), "one");
    worker.kill();
    // Nobody has the directory open. Others go on, in the order of their choice.
    let host = PassHost::open(directory.path(), None).unwrap();
    let client = join(&host, "one");
    let _worker = start_worker(directory.path(), &["echo"]);
    assert_answers(&collect(&client, 10), "one");
    assert_eq!(client.room(), 64);
}

/// Leaves ten answers to a client of that name, which is dead.
fn leave_answers(host: &Arc<PassHost>, directory: &Path, name: &str) -> Process {
    ask_and_die(directory, name);
    let worker = start_worker(directory, &["echo"]);
    until("all are answered", || done(host) == 10);
    worker
}

fn done(host: &PassHost) -> usize {
    let ring = host.ring();
    (0..ring.layout().slot_count()).filter(|slot| ring.word(*slot).is_done()).count()
}

fn old_answers() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let _worker = leave_answers(&host, directory.path(), "one");
    let client = join(&host, "one");
    let new: BTreeSet<_> = (0..50)
        .map(|_| client.submit(&Pass::named("echo", b"new".to_vec()).tag(99)).unwrap())
        .collect();
    let (new_ends, old_ends): (Vec<_>, Vec<_>) =
        collect(&client, 60).into_iter().partition(|end| new.contains(&end.pass));
    assert_answers(&old_ends, "one");
    assert!(new_ends.iter().all(|end| end.tag == 99 && end.outcome == returned(b"new")));
}

fn strangers_leftovers() {
    let directory = tempfile::tempdir().unwrap();
    let host = open_for(directory.path(), 1);
    let _worker = leave_answers(&host, directory.path(), "one");
    let client = join(&host, "two");
    client.submit(&Pass::named("echo", b"new".to_vec()).tag(99)).unwrap();
    let ends = collect(&client, 1);
    assert_eq!((ends[0].tag, ends[0].outcome.clone()), (99, returned(b"new")));
    assert_eq!(client.poll(|end| panic!("{end:?}")), 0);
    // They are dropped, counted, and their slots serve again.
    assert_eq!(host.ring().header().orphaned.load(SeqCst), 10);
    assert_eq!(client.room(), 64);
}

fn strangers_leftovers_later() {
    let directory = tempfile::tempdir().unwrap();
    let host = open_for(directory.path(), 1);
    ask_and_die(directory.path(), "one");
    // Takes the row, and dies with it. The passes of the first wait still.
    ask_and_die(directory.path(), "two");
    let client = join(&host, "two");
    let _worker = start_worker(directory.path(), &["echo"]);
    assert_answers(&collect(&client, 10), "two");
    until("the slots of the first are free", || {
        client.poll(|end| panic!("{end:?}"));
        client.room() == 64
    });
}

fn tended_row() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let _worker = leave_answers(&host, directory.path(), "one");
    // A watchdog of another process is looking at the row in this moment.
    let watchdog = open(directory.path());
    let row = meshwork::protocol::pass::ClientIndex(0);
    let looking = watchdog.lock_client(row).unwrap().unwrap();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| join(&host, "one"));
        std::thread::sleep(Duration::from_millis(20));
        drop(looking);
        assert_answers(&collect(&joining.join().unwrap(), 10), "one");
    });
}

fn uncollected() {
    let directory = tempfile::tempdir().unwrap();
    let geometry =
        Geometry { clients: 5, slots_per_client: 4_096, workers: 64, payload_bytes: 4_096 };
    let host = PassHost::open(directory.path(), Some(geometry)).unwrap();
    let _worker = start_worker(directory.path(), &["echo"]);
    let clients: Vec<_> = (0..5).map(|index| join(&host, &format!("client {index}"))).collect();
    for (client, handle) in (0..).zip(&clients) {
        for tag in 0..4_096_u64 {
            let args = (client << 32 | tag).to_le_bytes().to_vec();
            handle.submit(&Pass::named("echo", args).tag(tag)).unwrap();
        }
        let error = handle.submit(&Pass::named("echo", vec![])).unwrap_err();
        assert_eq!(error.to_string(), "all 4096 slots of the client are in use");
    }
    until("all have run", || done(&host) == 5 * 4_096);
    for (client, handle) in (0_u64..).zip(&clients) {
        let mut ends = collect(handle, 4_096);
        ends.sort_by_key(|end| end.tag);
        for (tag, end) in (0..).zip(ends) {
            let args = (client << 32 | tag).to_le_bytes();
            assert_eq!((end.tag, end.outcome), (tag, returned(&args)));
        }
    }
}

fn poison() {
    let directory = tempfile::tempdir().unwrap();
    let host = open(directory.path());
    let client = join(&host, "client");
    let mut workers: Vec<_> =
        (0..4).map(|_| start_worker(directory.path(), &["abort", "echo"])).collect();
    let bad = client.submit(&Pass::named("abort", vec![]).attempts(3)).unwrap();
    let good: BTreeSet<_> =
        (0..50).map(|_| client.submit(&Pass::named("echo", b"x".to_vec())).unwrap()).collect();
    let mut ends = Vec::new();
    tend_until(&host, "all have ended", || {
        client.poll(|end| ends.push(end.into_owned()));
        ends.len() >= 51
    });
    let (poisoned, others): (Vec<_>, Vec<_>) = ends.into_iter().partition(|end| end.pass == bad);
    let poisoned: Vec<_> = poisoned.into_iter().map(|end| (end.attempt, end.outcome)).collect();
    assert_eq!(poisoned, [(2, PassOutcome::Poisoned)]);
    assert_eq!(others.iter().map(|end| end.pass).collect::<BTreeSet<_>>(), good);
    assert!(others.iter().all(|end| end.attempt == 0 && end.outcome == returned(b"x")));
    let header = host.ring().header();
    assert_eq!((header.poisoned.load(SeqCst), header.requeued.load(SeqCst)), (1, 2));
    let mut ended = Vec::new();
    until("three workers have ended", || {
        workers.retain_mut(|worker| match worker.has_ended() {
            Some(status) => {
                ended.push(matches!(status, WaitStatus::Signaled(_, Signal::SIGABRT, _)));
                false
            }
            None => true,
        });
        ended.len() == 3
    });
    assert_eq!((ended, workers.len()), (vec![true; 3], 1));
}
