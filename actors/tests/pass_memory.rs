//! Passes over a ring that lies in this process's own memory.
//!
//! By itself this is a test of what comes back. Under a checker of memory (`./tests/run` uses
//! valgrind; Miri needs a nightly toolchain) it also shows that no step touches a byte outside of the
//! ring or one that nobody wrote: the ring is an allocation there, and everything else is not.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::HashMap;
use std::sync::Arc;

use meshwork_actors::host::mapped_file::LockFile;
use meshwork_actors::host::pass::{Pass, PassOutcome};
use meshwork_actors::host::pass_client::{ClientOptions, PassClient};
use meshwork_actors::host::pass_host::PassHost;
use meshwork_actors::host::pass_ring::WorkerSeat;
use meshwork_protocol::pass::frame::{Reply, Status};
use meshwork_protocol::pass::layout::{Geometry, Layout};
use meshwork_protocol::pass::{ClientIndex, ClosureId, PassId};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const PAYLOAD: usize = 4_096;

/// Lengths around every boundary: of the place in the slot, and of the buffer.
const LENGTHS: [usize; 9] = [0, 1, 47, 48, 49, 50, 2_000, PAYLOAD - 1, PAYLOAD];

#[derive(Clone, Copy, Debug)]
enum Step {
    Submit {
        args: usize,
        low: bool,
    },
    Cancel,
    /// A worker claims a pass, and replies with so many bytes, written in so many parts.
    Run {
        result: usize,
        parts: usize,
    },
    /// A worker claims a pass, writes half a reply and dies.
    Die,
    Collect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = proptest::sample::select(&LENGTHS[..]);
    let step = prop_oneof![
        4 => (length.clone(), any::<bool>()).prop_map(|(args, low)| Step::Submit { args, low }),
        1 => Just(Step::Cancel),
        4 => (length, 1usize..4).prop_map(|(result, parts)| Step::Run { result, parts }),
        1 => Just(Step::Die),
        2 => Just(Step::Collect),
    ];
    proptest::collection::vec(step, 1..80)
}

/// Bytes that no other pass has in that order.
fn bytes_of(tag: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|index| (tag.wrapping_mul(31) ^ index.wrapping_mul(7)) as u8).collect()
}

/// What a pass was given, and what a worker answered.
#[derive(Debug, PartialEq)]
struct UnderWay {
    tag: u64,
    args: usize,
    answer: Option<usize>,
}

struct Bench {
    host: Arc<PassHost>,
    client: PassClient,
    next_tag: u64,
    under_way: HashMap<PassId, UnderWay>,
    _directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let geometry = Geometry {
            clients: 2,
            slots_per_client: 64,
            workers: 64,
            payload_bytes: PAYLOAD as u32,
        };
        let directory = tempfile::tempdir().unwrap();
        let locks = LockFile::open(&directory.path().join("locks")).unwrap();
        let host = PassHost::on_heap(Layout::new(geometry).unwrap(), locks);
        // The last range, so that what lies past its end is past the end of the allocation.
        let first = PassClient::join(&host, ClientOptions::default()).unwrap();
        let client = PassClient::join(&host, ClientOptions::default()).unwrap();
        assert_eq!(client.index(), ClientIndex(1));
        drop(first);
        Self { host, client, next_tag: 0, under_way: HashMap::new(), _directory: directory }
    }

    fn seat(&self) -> WorkerSeat {
        self.host.join_worker("w").unwrap()
    }

    fn step(&mut self, step: Step, last: &mut Option<PassId>) {
        match step {
            Step::Submit { args, low } => {
                let tag = self.next_tag;
                let pass = Pass::new(ClosureId(9), bytes_of(tag, args)).tag(tag).attempts(63);
                let pass = if low { pass.low_priority() } else { pass };
                if self.client.room() > 0 {
                    let id = self.client.submit(&pass).unwrap();
                    *last = Some(id);
                    self.next_tag += 1;
                    self.under_way.insert(id, UnderWay { tag, args, answer: None });
                }
            }
            Step::Cancel => {
                if let Some(pass) = last.take() {
                    self.client.cancel(pass);
                }
            }
            Step::Run { result, parts } => {
                let mut seat = self.seat();
                if let Some(mut call) = seat.claim(|_| true) {
                    let under_way = self.under_way.get_mut(&call.pass()).unwrap();
                    let (args, mut writer) = call.parts();
                    assert_eq!(args, bytes_of(under_way.tag, under_way.args));
                    let bytes = bytes_of(under_way.tag + 1, result);
                    for part in bytes.chunks(result.div_ceil(parts).max(1)) {
                        writer.write(part);
                    }
                    under_way.answer = Some(result);
                    let reply =
                        Reply { status: Status::Returned, bytes: result as u32, cut: false };
                    call.complete(reply);
                }
                self.host.leave_worker(seat);
            }
            Step::Die => {
                let mut seat = self.seat();
                if let Some(mut call) = seat.claim(|_| true) {
                    call.parts().1.write(&[0xdd; PAYLOAD]);
                }
                // Its lock goes with it; who takes the row next recovers what it had claimed.
                drop(seat);
            }
            Step::Collect => self.collect(),
        }
    }

    fn collect(&mut self) {
        let under_way = &mut self.under_way;
        self.client.poll(|end| {
            let pass = under_way.remove(&end.pass).expect("it was under way");
            assert_eq!(end.tag, pass.tag);
            match (end.outcome, pass.answer) {
                (PassOutcome::Returned(bytes), Some(length)) => {
                    assert_eq!(bytes, bytes_of(pass.tag + 1, length));
                }
                (PassOutcome::Cancelled, None) => {}
                (outcome, answer) => panic!("{outcome:?} for {answer:?}"),
            }
        });
    }

    /// Runs and collects what is left.
    fn end(mut self) {
        let run = Step::Run { result: 1, parts: 1 };
        for _ in 0..2 * self.next_tag + 2 {
            self.step(run, &mut None);
            self.collect();
        }
        assert_eq!(self.under_way, HashMap::new(), "passes that never came back");
    }
}

#[test]
fn every_byte_of_a_ring_on_the_heap_is_its_own() {
    // A checker makes each step many times slower.
    let cases = if std::env::var_os("MESHWORK_MEMORY_CHECKED").is_some() { 12 } else { 128 };
    let mut runner = TestRunner::new(ProptestConfig { cases, ..ProptestConfig::default() });
    let run = runner.run(&steps(), |steps| {
        let (mut bench, mut last) = (Bench::new(), None);
        for step in steps {
            bench.step(step, &mut last);
        }
        bench.end();
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
}

/// Every buffer to its last byte, that of the allocation included.
#[test]
fn a_range_full_of_the_largest_fits() {
    let mut bench = Bench::new();
    for step in [
        Step::Submit { args: PAYLOAD, low: false },
        Step::Run { result: PAYLOAD, parts: 1 },
        Step::Collect,
    ] {
        (0..64).for_each(|_| bench.step(step, &mut None));
    }
    assert_eq!(bench.under_way, HashMap::new());
    bench.end();
}
