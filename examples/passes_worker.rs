//! A worker process of `passes_coordinator`: start as many as there are processors, and kill any of
//! them at any time.
//!
//! ```sh
//! cargo run --release --example passes_worker -- /dev/shm/primes --name worker-1
//! ```
//!
//! SIGTERM ends it after the pass that it runs.

use std::process::ExitCode;

use meshwork::passes::{PassCall, PassRegistry, worker_main};

/// Counts the primes in `first..end`, two numbers of eight bytes each.
fn count_primes(call: &PassCall<'_>) -> Result<[u8; 8], String> {
    let number = |at: usize| -> Option<u64> {
        Some(u64::from_le_bytes(call.args.get(at..at + 8)?.try_into().ok()?))
    };
    let (Some(first), Some(end)) = (number(0), number(8)) else {
        return Err("the arguments are two numbers of eight bytes".into());
    };
    let is_prime =
        |n: &u64| *n > 1 && (2..).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    Ok(((first..end).filter(is_prime).count() as u64).to_le_bytes())
}

fn main() -> ExitCode {
    let registry = PassRegistry::new();
    registry.register("count_primes", count_primes).expect("it is the first closure");
    // Takes the directory and the number of threads from the command line; see --help.
    worker_main(registry)
}
