//! An actor system that shares work between the nodes of a mesh, on actix.
//!
//! A [`Mesh`] is one node: it finds others by gossip, places keyed jobs on a hash ring, steals from
//! busier peers, and keeps a database as the source of truth.
//!
//! ```no_run
//! use meshwork::prelude::*;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Add(u64, u64);
//!
//! impl Job for Add {
//!     const NAME: &'static str = "add";
//!     type Output = u64;
//! }
//!
//! async fn add(Add(a, b): Add) -> Result<u64, JobError> {
//!     a.checked_add(b).ok_or_else(|| JobError::permanent("too large"))
//! }
//!
//! #[actix::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let mesh = Mesh::builder("worker-1").job(add).start().await?;
//!     let ticket = mesh.enqueue(Enqueue::new(&Add(2, 3))).await?;
//!     assert_eq!(mesh.outcome(&ticket).await, Outcome::Succeeded(5));
//!     mesh.drain(std::time::Duration::from_secs(5)).await;
//!     Ok(())
//! }
//! ```
#![forbid(unsafe_code)]

/// Compiles and runs the program of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod builder;
mod config;
mod handler;
mod links;
mod mesh;
#[cfg(target_os = "linux")]
pub mod passes;
mod placement;
mod store;
mod wiring;

pub use builder::{MeshBuilder, StartError};
pub use config::ConfigError;
pub use handler::{Data, FromAttempt, JobContext, JobError, JobHandler, JobOptions};
pub use links::{Dialler, Dialling, DirectLinks, Links, Stream, TcpDialler, Transmit};
pub use mesh::{DrainReport, Mesh, Outcome, OutcomeError};
pub use meshwork_actors::mesh::membership_store::Subscribe;
pub use meshwork_actors::mesh::ring_keeper::OwnerOf;
pub use meshwork_actors::metrics::MetricsSnapshot;
pub use meshwork_actors::overseer::{Joining, StopReason};
pub use meshwork_actors::store::messages::{Counts, JobRow, StoreError};
pub use meshwork_actors::subscribers::{MemberTable, MembershipChanged};
pub use meshwork_actors::work::enqueue::{
    Accepted, Enqueue, EnqueueBatch, EnqueueError, Job, Request, Ticket,
};
pub use meshwork_actors::work::job_events::JobEvent;
pub use meshwork_actors::work::result_collector::Followed;
pub use meshwork_actors::{self as actors, protocol};
pub use meshwork_protocol::hash_ring::HashRing;
pub use meshwork_protocol::id::{Generation, JobId, NodeId, Tenant};
pub use meshwork_protocol::job::{JobState, Recorded};
pub use meshwork_protocol::load::Load;
pub use meshwork_protocol::swim::{Member, MemberState, MembershipEvent};
#[cfg(target_os = "linux")]
pub use passes::{Passes, worker_main};
pub use placement::Placement;
pub use store::Store;
pub use wiring::{ActorRecord, Edge, WiringRecord};

/// What most programs need.
pub mod prelude {
    pub use crate::{
        Data, Enqueue, EnqueueError, Job, JobContext, JobError, JobOptions, MembershipChanged,
        MembershipEvent, Mesh, Outcome, Placement, StartError, StopReason, Store, Subscribe,
        Ticket,
    };
}
