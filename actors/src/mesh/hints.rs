//! Small news to one peer, by datagram: a lost one costs a poll interval, never a job.

use std::sync::Arc;

use actix::prelude::*;
use arc_swap::ArcSwap;
use meshwork_protocol::id::NodeId;
use meshwork_protocol::wire::datagram::{Body, Writer};

use crate::identity::Identity;
use crate::mesh::gossip_socket::Transmit;
use crate::subscribers::MemberTable;

/// Sends hints to members by name.
#[derive(Clone)]
pub struct Hints {
    identity: Arc<Identity>,
    table: Arc<ArcSwap<MemberTable>>,
    transmit: Recipient<Transmit>,
}

impl Hints {
    /// Hints signed by `identity`, addressed by `table`.
    pub fn new(
        identity: Arc<Identity>,
        table: Arc<ArcSwap<MemberTable>>,
        transmit: Recipient<Transmit>,
    ) -> Self {
        Self { identity, table, transmit }
    }

    /// Sends `body` to `node` if it is present.
    pub fn send(&self, node: &NodeId, body: Body) {
        let table = self.table.load();
        if let Some(member) = table.get(node).filter(|m| m.is_present()) {
            let message = Writer::new(self.identity.sender(), body).finish();
            self.transmit.do_send(Transmit { to: member.gossip, message });
        }
    }
}
