//! 64 KiB from one process to another: as passes, and by hand.
//!
//! By hand: [`DEPTH`] buffers in a mapped file, each with a flag. One process copies in and sets the
//! flag, the other copies out and clears it. Both copy as a pass does: once in, once out.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use meshwork::actors::host::mapped_file::RawBuffers;
use meshwork::actors::host::pass::{Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::passes::Spin;

use crate::common::shared_directory;
use crate::worker::{KEEP, Role};

/// How many are under way at once, on both sides.
pub(crate) const DEPTH: usize = 16;

const BYTES: usize = 64 << 10;
const WARM_UP: usize = 2_000;
const COPIES: usize = 20_000;

/// Transfers a second.
pub(crate) struct Rates {
    /// As passes.
    pub(crate) passes: f64,
    /// By hand.
    pub(crate) raw: f64,
}

/// One measurement of both; who is first alternates with the rounds.
pub(crate) fn rates_per_s(round: usize) -> Rates {
    if round.is_multiple_of(2) {
        Rates { passes: passes_per_s(), raw: raw_per_s() }
    } else {
        Rates { raw: raw_per_s(), passes: passes_per_s() }
    }
}

fn passes_per_s() -> f64 {
    let directory = shared_directory();
    let host = PassHost::open(directory.path(), None).expect("a fresh directory");
    let _worker = Role::Worker(directory.path().to_owned(), Spin::Adaptive).start();
    let options = ClientOptions { name: "bench".to_owned(), ..ClientOptions::default() };
    let client = PassClient::join(&host, options).expect("there is a free row");
    let pass = Pass::named(KEEP, vec![7; BYTES]);
    let pump = |passes: usize| {
        let (mut submitted, mut collected) = (0, 0);
        while collected < passes {
            while submitted < passes && submitted - collected < DEPTH {
                match client.submit(&pass) {
                    Ok(_) => submitted += 1,
                    Err(SubmitError::Busy(_)) => break,
                    Err(error) => panic!("a pass was refused: {error}"),
                }
            }
            collected += client.poll(|completion| {
                let PassOutcome::Returned(_) = completion.outcome else {
                    panic!("the pass came to {completion:?}");
                };
            });
        }
    };
    per_s(pump)
}

fn raw_per_s() -> f64 {
    let directory = shared_directory();
    let shared = buffers(directory.path());
    let _copier = Role::Copier(directory.path().to_owned()).start();
    let bytes = vec![7; BYTES];
    per_s(|copies| {
        for copy in 0..copies {
            shared.put(copy % DEPTH, black_box(&bytes));
        }
        (0..DEPTH).for_each(|buffer| shared.wait_until_empty(buffer));
    })
}

fn per_s(mut pump: impl FnMut(usize)) -> f64 {
    pump(WARM_UP);
    let begin = Instant::now();
    pump(COPIES);
    COPIES as f64 / begin.elapsed().as_secs_f64()
}

fn buffers(directory: &Path) -> RawBuffers {
    RawBuffers::open(&directory.join("raw"), DEPTH, BYTES).expect("the directory can be written")
}

/// Copies out of each buffer in turn, as soon as it is full.
pub(crate) fn take_for_ever(directory: &Path) {
    let buffers = buffers(directory);
    let mut bytes = vec![0; BYTES];
    for buffer in (0..DEPTH).cycle() {
        buffers.take(buffer, black_box(&mut bytes));
    }
}
