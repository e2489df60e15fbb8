//! The actors of work: the local deque and what fills it.

pub mod deque_owner;
pub mod enqueue;
pub mod job_events;
pub mod lease_keeper;
#[cfg(target_os = "linux")]
pub mod pass_awaits;
pub mod prefetcher;
pub mod result_collector;
pub mod steal_listener;
pub mod stealer;
