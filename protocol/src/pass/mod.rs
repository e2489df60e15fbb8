//! Passes: small calls that one process of a machine hands to another, through shared memory.
//!
//! A client owns a range of slots. It writes a call into a free one, marks it ready, and leaves a
//! hint of it in a ring. A worker of any process claims the *slot*, runs the closure, writes the
//! reply into the same slot and marks it done; the client collects it and the slot is free again.
//! The slot's word ([`slot`]) is the truth, and it names who may touch the slot's bytes; the ring
//! ([`ring`]) only says where to look, so that a process killed between any two instructions leaves
//! nothing worse than a hint too few or too many.
//!
//! Here are the rules: the word and its legal changes, the order of the steps, what recovers each of
//! them, and where every byte lies ([`layout`]). They are written over a trait for an atomic word
//! ([`atomic`]), so that the same code runs on mapped memory, on a heap, and under a model checker
//! that kills threads between steps. Mapping, locking and sleeping are the actors' part.

pub mod atomic;
pub mod beats;
pub mod board;
pub mod frame;
pub mod layout;
pub mod patience;
pub mod ring;
pub mod slot;
pub mod succession;
pub mod unserved;

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::limits::PASS_SLOTS_MAX;

const _: () = assert!(PASS_SLOTS_MAX == 1 << (64 - 46), "a fencing token has bits for the slot");

/// What a closure is known by in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClosureId(pub u32);

impl ClosureId {
    /// The id of a closure that is known by its name: the lower half of the name's XXH3. Two names
    /// have the same once in four thousand million pairs; a registry refuses the second, and a worker
    /// logs an error where another process has the other.
    pub fn of_name(name: &str) -> Self {
        Self(xxh3_64(name.as_bytes()) as u32)
    }
}

impl fmt::Display for ClosureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A worker's row, and its number in slot words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerIndex(pub u16);

/// A client's row, and its range of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClientIndex(pub u16);

/// One pass: the slot that holds it, and the slot's generation. No two passes of a boot share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PassId {
    /// The slot, counted over all ranges.
    pub slot: u32,
    /// How often the slot had been used, this time included.
    pub generation: u64,
}

impl PassId {
    /// What the closure may fence its own writes with: no other run of any pass has the same, and of
    /// two runs of one pass the later has the greater. Attempts count from zero.
    pub fn fencing_token(self, attempt: u8) -> u64 {
        let slot = u64::from(self.slot % PASS_SLOTS_MAX);
        let generation = self.generation & slot::GENERATION_MASK;
        slot << 46 | generation << 6 | u64::from(attempt & slot::ATTEMPT_MAX)
    }
}

impl fmt::Display for PassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// Which ring a pass is hinted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// Served first.
    #[default]
    High,
    /// Served when nothing of high priority waits, and at every
    /// [`LOW_TURN`](board::LOW_TURN)th claim.
    Low,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fencing_token_grows_with_the_attempt_and_is_nobody_elses() {
        let pass = PassId { slot: 3, generation: 9 };
        assert_eq!(pass.fencing_token(0), (3 << 46) | (9 << 6));
        assert_eq!(pass.fencing_token(5), (3 << 46) | (9 << 6) | 5);
        let next = PassId { slot: 3, generation: 10 };
        assert!(next.fencing_token(0) > pass.fencing_token(63));
    }

    #[test]
    fn a_name_always_gives_the_same_id() {
        assert_eq!(ClosureId::of_name("resize"), ClosureId::of_name("resize"));
        assert_eq!(ClosureId::of_name("").to_string(), "0x38d394c2");
    }
}
