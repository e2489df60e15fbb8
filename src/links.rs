//! The seam between a node and its network, where a demonstration puts a slow one.

use std::sync::Arc;

use actix::prelude::*;
pub use meshwork_actors::mesh::gossip_socket::Transmit;
pub use meshwork_actors::mesh::links::{Dialler, Dialling, Stream, TcpDialler};

/// What stands between a node and its network.
pub trait Links: Send + Sync {
    /// Where datagrams are to be sent, given where the socket takes them.
    fn datagrams(&self, socket: Recipient<Transmit>) -> Recipient<Transmit>;
    /// How streams are opened.
    fn dialler(&self) -> Arc<dyn Dialler>;
}

/// The network as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct DirectLinks;

impl Links for DirectLinks {
    fn datagrams(&self, socket: Recipient<Transmit>) -> Recipient<Transmit> {
        socket
    }

    fn dialler(&self) -> Arc<dyn Dialler> {
        Arc::new(TcpDialler)
    }
}
