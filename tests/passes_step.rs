//! Kills a process at every instruction boundary of every operation on the pass memory: see
//! [`stepper`]. It sets breakpoints and reads registers, so it is for one kind of processor.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(clippy::zombie_processes, reason = "they are awaited by their number, with their status")]

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod passes;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "passes_step/stepper.rs"]
mod stepper;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() -> std::process::ExitCode {
    stepper::main()
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() {
    println!("skipped: this steps through the instructions of x86_64 on Linux");
}
