//! 64 KiB from one process to another: as passes, and by hand.
//!
//! By hand: [`DEPTH`] buffers in a mapped file, each with a flag. One process copies in and sets the
//! flag, the other copies out and clears it. Both copy as a pass does: once in, once out.
#![allow(unsafe_code, reason = "a raw copy through mapped memory is what passes are compared with")]

use std::fs::OpenOptions;
use std::hint::{black_box, spin_loop};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use memmap2::{MmapOptions, MmapRaw};
use meshwork::actors::host::pass::{Pass, PassOutcome, SubmitError};
use meshwork::actors::host::pass_client::{ClientOptions, PassClient};
use meshwork::actors::host::pass_host::PassHost;
use meshwork::passes::Spin;

use crate::worker::{KEEP, Process, Role, shared_directory};

/// How many are under way at once, on both sides.
pub(crate) const DEPTH: usize = 16;

const BYTES: usize = 64 << 10;
const FLAG_BYTES: usize = 128;
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
    let _worker = Process::start(&Role::Worker(directory.path().to_owned(), Spin::Adaptive));
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
    let shared = Shared::open(directory.path());
    let _copier = Process::start(&Role::Copier(directory.path().to_owned()));
    let bytes = vec![7; BYTES];
    per_s(|copies| {
        for copy in 0..copies {
            shared.put(copy % DEPTH, black_box(&bytes));
        }
        (0..DEPTH).for_each(|buffer| shared.wait_until(buffer, EMPTY));
    })
}

fn per_s(mut pump: impl FnMut(usize)) -> f64 {
    pump(WARM_UP);
    let begin = Instant::now();
    pump(COPIES);
    COPIES as f64 / begin.elapsed().as_secs_f64()
}

const EMPTY: u64 = 0;
const FULL: u64 = 1;

/// The buffers and their flags, in a file that both processes map: the flags first, each on lines of
/// its own, then the buffers.
pub(crate) struct Shared(MmapRaw);

impl Shared {
    /// Maps the file of a directory, and makes it if it is not there.
    pub(crate) fn open(directory: &Path) -> Self {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(directory.join("raw"))
            .expect("the directory can be written");
        let length = DEPTH * (FLAG_BYTES + BYTES);
        file.set_len(length as u64).expect("there is memory");
        Self(MmapOptions::new().len(length).map_raw(&file).expect("the file can be mapped"))
    }

    /// Copies out of each buffer in turn, as soon as it is full.
    pub(crate) fn take_for_ever(&self) {
        let mut bytes = vec![0; BYTES];
        for buffer in (0..DEPTH).cycle() {
            self.wait_until(buffer, FULL);
            // SAFETY: the buffer lies in the mapping, which lives as long as `self`. Pair `full`: the
            // other process does not touch it until the flag says that it is empty.
            let from = unsafe { std::slice::from_raw_parts(self.buffer(buffer), BYTES) };
            bytes.copy_from_slice(from);
            black_box(&mut bytes);
            // Pair `empty` with the load in `wait_until`.
            self.flag(buffer).store(EMPTY, Release);
        }
    }

    /// Copies into a buffer once it is empty.
    fn put(&self, buffer: usize, bytes: &[u8]) {
        self.wait_until(buffer, EMPTY);
        // SAFETY: as in `take_for_ever`, with pair `empty`; `bytes` is private memory of this process.
        let into = unsafe { std::slice::from_raw_parts_mut(self.buffer(buffer), BYTES) };
        into.copy_from_slice(bytes);
        // Pair `full` with the load in `wait_until`.
        self.flag(buffer).store(FULL, Release);
    }

    fn wait_until(&self, buffer: usize, state: u64) {
        while self.flag(buffer).load(Acquire) != state {
            spin_loop();
        }
    }

    fn flag(&self, buffer: usize) -> &AtomicU64 {
        assert!(buffer < DEPTH);
        // SAFETY: in the mapping, aligned to its line, and only ever used as an atomic.
        unsafe { &*self.0.as_mut_ptr().add(buffer * FLAG_BYTES).cast::<AtomicU64>() }
    }

    fn buffer(&self, buffer: usize) -> *mut u8 {
        assert!(buffer < DEPTH);
        // SAFETY: the flags and `buffer` buffers before it are in the mapping, and so is all of it.
        unsafe { self.0.as_mut_ptr().add(DEPTH * FLAG_BYTES + buffer * BYTES) }
    }
}
