//! The worker processes, and the closures that they have.

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use meshwork::passes::{PassRegistry, Spin};
use rustix::time::{ClockId, clock_gettime};

use crate::common::echo;
use crate::common::process::{Process, ready_until_the_end};
use crate::copy;

/// Copies its arguments out and returns nothing.
pub(crate) const KEEP: &str = "keep";
/// At the first attempt says which process it runs in, to the socket that its arguments name, and
/// hangs; at a later one returns when it began.
pub(crate) const HANG: &str = "hang";

/// Longer than any run of the benchmark.
const FOR_EVER: Duration = Duration::from_secs(3_600);

const WORKER: &str = "--worker";
const COPIER: &str = "--copier";

/// What this program is when it is run by itself.
pub(crate) enum Role {
    /// A pass worker in this directory.
    Worker(PathBuf, Spin),
    /// The other end of the raw copy, in this directory.
    Copier(PathBuf),
}

impl Role {
    /// The role that the arguments name, if they name one.
    pub(crate) fn parse(args: &[String]) -> Option<Self> {
        match args {
            [role, directory, spin] if role == WORKER => {
                let spin = [Spin::Adaptive, Spin::Always, Spin::Never]
                    .into_iter()
                    .find(|kind| format!("{kind:?}") == *spin)?;
                Some(Self::Worker(directory.into(), spin))
            }
            [role, directory] if role == COPIER => Some(Self::Copier(directory.into())),
            _ => None,
        }
    }

    /// Does it until the process that started this one ends it.
    pub(crate) fn run(self) {
        match self {
            Self::Worker(directory, spin) => {
                let _worker = echo::start_worker(&directory, registry(), spin);
                ready_until_the_end();
            }
            Self::Copier(directory) => {
                std::thread::spawn(move || copy::take_for_ever(&directory));
                ready_until_the_end();
            }
        }
    }

    /// Starts a process that does it.
    pub(crate) fn start(&self) -> Process {
        Process::start(&self.args())
    }

    fn args(&self) -> Vec<OsString> {
        match self {
            Self::Worker(directory, spin) => {
                vec![WORKER.into(), directory.into(), format!("{spin:?}").into()]
            }
            Self::Copier(directory) => vec![COPIER.into(), directory.into()],
        }
    }
}

fn registry() -> PassRegistry {
    let registry = PassRegistry::new();
    echo::register(&registry);
    registry
        .register_writing(KEEP, |call, _| {
            thread_local!(static KEPT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
            KEPT.with_borrow_mut(|kept| {
                kept.clear();
                kept.extend_from_slice(call.args);
                std::hint::black_box(&*kept);
            });
            Ok::<_, String>(())
        })
        .expect("names differ");
    registry
        .register(HANG, |call| {
            if call.attempt > 0 {
                return Ok(monotonic_ns().to_le_bytes());
            }
            let path = std::str::from_utf8(call.args).map_err(|error| error.to_string())?;
            UnixDatagram::unbound()
                .and_then(|socket| socket.send_to(&std::process::id().to_le_bytes(), path))
                .map_err(|error| error.to_string())?;
            std::thread::sleep(FOR_EVER);
            Err("nobody killed it".to_owned())
        })
        .expect("names differ");
    registry
}

/// Nanoseconds of a clock that all processes share.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
