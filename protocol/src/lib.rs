//! The rules of meshwork, without a clock, a socket, a thread or a source of randomness.
//!
//! Every machine here is driven the same way:
//!
//! 1. `handle_*(&mut self, now, input)` changes state and queues effects;
//! 2. `poll_effect(&mut self)` hands the effects out, oldest first, until it returns `None`;
//! 3. `poll_timeout(&self)` says when `handle_timeout` must be called at the latest. It is asked
//!    again after every call of step 1.
//!
//! Time comes in as [`time::Instant`], randomness as a seed at construction. The same inputs give
//! the same outputs, so each rule is tested by its exact effects and a whole mesh runs in one
//! thread on virtual time.
#![forbid(unsafe_code)]

pub mod credit;
pub mod deque;
pub mod hash_ring;
pub mod id;
pub mod job;
pub mod lease;
pub mod limits;
pub mod load;
pub mod pass;
pub mod prefetch;
#[cfg(feature = "sim")]
pub mod sim;
pub mod steal;
pub mod swim;
pub mod time;
pub mod wire;
