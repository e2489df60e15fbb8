//! What the binary does beside the demo, and what both share.

pub(crate) mod args;
pub(crate) mod digest;
pub(crate) mod ndjson;
pub(crate) mod node;
pub(crate) mod protocol;
pub(crate) mod service;
pub(crate) mod signals;
pub(crate) mod socket;
pub(crate) mod status;
