//! Passes: small calls between the processes of a host, through shared memory.
//!
//! The rules are [`meshwork_protocol::pass`]; [`mapped_file`] and [`pass_ring`] put them on a file,
//! and are the only two files with unsafe code. A process joins a directory by its
//! [`PassHost`](pass_host::PassHost), as a client ([`pass_client`]), as workers ([`worker_thread`]),
//! or both; [`reclaimer`] takes over what the dead left, and [`snapshot`] is what one who only looks
//! sees. The actors `PassSubmitter`, `PassWorker`, `HeartbeatWriter` and `Watchdog` carry these.

pub mod heartbeat_writer;
pub mod mapped_file;
pub mod parking;
pub mod pass;
pub mod pass_client;
pub mod pass_host;
pub mod pass_ring;
pub mod pass_submitter;
pub mod pass_worker;
pub mod process;
pub mod reclaimer;
pub mod records;
pub mod registry;
pub mod snapshot;
pub mod watchdog;
pub mod worker_thread;
