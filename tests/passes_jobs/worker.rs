//! The worker process of the test beside it: handlers that do what none should.

mod kinds;

use std::process::ExitCode;

use kinds::{Abort, Fails, Fill, Hang, Panics, Square, Squared};
use meshwork::passes::{PassRegistry, RegisterError, RegisterJob, worker_main};
use meshwork::prelude::*;

fn register(registry: &PassRegistry) -> Result<(), RegisterError> {
    registry.register_job::<Square>(|Square(n), _| {
        Ok(Squared { square: n * n, pid: std::process::id() })
    })?;
    registry.register_job::<Abort>(|Abort { times }, call| {
        if call.attempt <= times {
            std::process::abort();
        }
        Ok(call.attempt)
    })?;
    registry.register_job::<Hang>(|Hang, call| {
        if call.attempt == 1 {
            loop {
                std::thread::park();
            }
        }
        Ok(std::process::id())
    })?;
    registry.register_job::<Panics>(|Panics, _| panic!("no such luck"))?;
    registry.register_job::<Fails>(|Fails, call| match call.attempt {
        1 => Err(JobError::retry("not yet")),
        _ => Err(JobError::permanent("not ever")),
    })?;
    registry.register_job::<Fill>(|Fill { bytes }, _| Ok("x".repeat(bytes)))?;
    Ok(())
}

fn main() -> ExitCode {
    let registry = PassRegistry::new();
    register(&registry).expect("each kind of job has a name of its own");
    worker_main(registry)
}
