//! The actors of membership: they run on the `control` arbiter, which carries nothing that a tenant
//! can feed.

pub mod gossip_socket;
pub mod hints;
pub mod links;
pub mod membership_store;
pub mod ring_keeper;
pub mod swim_prober;
