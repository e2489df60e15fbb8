//! Our side of the scenarios: passes whose result is their arguments.

use std::path::Path;

use meshwork::actors::host::worker_thread::WorkerThread;
use meshwork::passes::{
    ClientOptions, Pass, PassClient, PassHost, PassOutcome, PassRegistry, Spin, SubmitError,
    WorkerOptions,
};

use super::scenario::Client;

/// The arguments of a pass, and its result.
pub(crate) const ARG_BYTES: usize = 48;

/// The closure.
pub(crate) const ECHO: &str = "echo";

/// Registers the closure.
pub(crate) fn register(registry: &PassRegistry) {
    let echo = registry.register_writing(ECHO, |call, reply| {
        reply.write(call.args);
        Ok::<_, String>(())
    });
    echo.expect("the name is free");
}

/// A worker in this process.
pub(crate) fn start_worker(directory: &Path, registry: PassRegistry, spin: Spin) -> WorkerThread {
    let host = PassHost::open(directory, None).expect("the directory is open already");
    let options = WorkerOptions { name: "bench".to_owned(), spin };
    WorkerThread::spawn(&host, registry, &options).expect("there is a free row")
}

/// One who submits such passes.
pub(crate) struct Echoes {
    client: PassClient,
    pass: Pass<'static>,
    submitted: u64,
    right: u64,
    wrong: u64,
}

impl Echoes {
    /// Joins the passes of a directory.
    pub(crate) fn join(directory: &Path) -> Self {
        let host = PassHost::open(directory, None).expect("a fresh directory");
        let options = ClientOptions { name: "bench".to_owned(), ..ClientOptions::default() };
        let client = PassClient::join(&host, options).expect("there is a free row");
        Self {
            client,
            pass: Pass::named(ECHO, vec![7; ARG_BYTES]),
            submitted: 0,
            right: 0,
            wrong: 0,
        }
    }
}

impl Echoes {
    /// Of the passes that were submitted, the share that came back as they should.
    #[allow(dead_code, reason = "the comparison asserts it")]
    pub(crate) fn returned(&self) -> f64 {
        self.right as f64 / self.submitted as f64
    }
}

impl Client for Echoes {
    #[inline]
    fn submit(&mut self) -> bool {
        match self.client.submit(&self.pass) {
            Ok(_) => {
                self.submitted += 1;
                true
            }
            Err(SubmitError::Busy(_)) => false,
            Err(error) => panic!("a pass was refused: {error}"),
        }
    }

    #[inline]
    fn collect(&mut self) -> u64 {
        let (right, wrong, args) = (&mut self.right, &mut self.wrong, &self.pass.args);
        self.client.poll(|completion| {
            let is_right =
                matches!(&completion.outcome, PassOutcome::Returned(bytes) if bytes == args);
            *right += u64::from(is_right);
            *wrong += u64::from(!is_right);
        }) as u64
    }

    fn wrong(&self) -> u64 {
        self.wrong
    }
}
