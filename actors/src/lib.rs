//! The actors of meshwork: one a file, each carrying rules of `meshwork-protocol` to sockets,
//! files and databases.
#![deny(unsafe_code)]

pub use meshwork_protocol as protocol;

pub mod store;
