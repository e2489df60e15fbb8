//! The actors of meshwork: one a file, each carrying rules of `meshwork-protocol` to sockets,
//! files and databases.
//!
//! Nothing here decides who is started or who knows whom: that is the wiring of the `meshwork`
//! crate. An actor is given `Recipient`s, never another actor's type.
#![deny(unsafe_code)]

pub use meshwork_protocol as protocol;

pub mod clock;
pub mod fair;
#[cfg(target_os = "linux")]
pub mod host;
pub mod identity;
pub mod load_cell;
pub mod mesh;
pub mod metrics;
pub mod overseer;
pub mod start;
pub mod store;
pub mod subscribers;
pub mod work;
