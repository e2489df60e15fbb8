//! Passes between the processes of a host.
pub mod mapped_file;
pub mod pass;
pub mod pass_client;
pub mod pass_host;
pub mod pass_ring;
pub mod patience;
pub mod process;
pub mod reclaimer;
pub mod records;
pub mod registry;
pub mod worker_thread;
