//! The simulator: many nodes, their network, mailboxes and clocks, on virtual time from one seed.
//!
//! A [`World`] runs hosts. Each host is one [`Machines`]: the set of pure machines of a node, with
//! inputs and outputs and nothing else. The world carries outputs to inputs: datagrams as bytes
//! through [`Network`], streams as frames, messages between the machines of one node through
//! delayed mailboxes. A further machine is a field of `Machines` and a variant of its mail; a
//! further fault is a field of [`Faults`]; a further rule is a file under [`invariants`].
//!
//! The same seed gives the same run, step by step. [`for_seeds`] runs a scenario over many and names
//! the one that failed.

mod host;
pub mod invariants;
mod machines;
mod network;
mod run;
mod streams;
mod world;

pub use host::{End, Host};
pub use machines::{Input, Machines, Output, Waiter};
pub use network::{Faults, Network};
pub use run::for_seeds;
pub use world::{HostIx, Step, World};
