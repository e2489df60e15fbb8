//! The stores: the source of truth for jobs and leases.
//!
//! Every store answers the same [`messages`], and passes the same conformance suite.

pub mod limits;
pub mod memory;
pub mod messages;
mod rules;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use rules::{CrashRule, WallClock};
