//! The examples of passes, as a user meets them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod passes_common;

use std::os::unix::process::ExitStatusExt;

use meshwork::passes::PassHost;
use passes_common::{Process, example};
use rustix::process::Signal;

#[test]
fn one_process_submits_to_its_own_workers() {
    let (status, said) = Process::start(&example("passes_single"), &[]).ended();
    assert!(status.success());
    assert_eq!(
        said.lines().collect::<Vec<_>>(),
        [
            "called: desserts",
            "submitted: \"drawer\" came back as \"reward\"",
            "submitted: \"deliver\" came back as \"reviled\"",
            "submitted: \"stop\" came back as \"pots\"",
            "submitted: \"\" came back as \"the closure failed: nothing to reverse\"",
        ]
    );
}

#[test]
fn a_coordinator_gets_everything_back_from_workers_of_which_one_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    // Made by the first process that opens it.
    let directory = folder.path().join("primes").display().to_string();
    let worker = example("passes_worker");
    let mut coordinator = Process::start(&example("passes_coordinator"), &[&directory, "100"]);
    let start = |name| Process::start(&worker, &[&directory, "--name", name]);
    let (mut victim, mut other) = (start("worker-1"), start("worker-2"));
    let line = |name, process: &Process, what| format!("{name} ({}) {what}", process.pid());
    let both = [line("worker-1", &victim, "joined"), line("worker-2", &other, "joined")];
    coordinator.says(&[&both[0], &both[1], "10 of 100 returned"]);
    victim.send(Signal::KILL);
    assert_eq!(victim.ended().0.signal(), Some(Signal::KILL.as_raw()));
    coordinator.says(&[&line("worker-1", &victim, "is gone")]);
    let mut third = start("worker-3");
    coordinator.says(&[&line("worker-3", &third, "joined")]);
    let (status, said) = coordinator.ended();
    assert!(status.success(), "{said}");
    let said: Vec<_> = said.lines().collect();
    let [.., returned, primes] = said[..] else { panic!("{said:?}") };
    assert!(returned.starts_with("all 100 returned, "), "{returned}");
    assert_eq!(primes, "there are 148933 primes below 2000000");

    // The workers tidy up after the coordinator, and leave when they are told to.
    let look = || PassHost::look(directory.as_ref()).unwrap();
    while !look().clients.is_empty() {
        std::thread::yield_now();
    }
    for worker in [&mut other, &mut third] {
        worker.send(Signal::TERM);
        let (status, said) = worker.ended();
        assert!(status.success() && said.is_empty(), "{status}: {said}");
    }
    assert_eq!(look().workers, []);
}
