//! Passes between the processes of a host.
pub mod mapped_file;
pub mod pass_ring;
