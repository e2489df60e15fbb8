//! The stores: the source of truth for jobs and leases.

pub mod messages;
