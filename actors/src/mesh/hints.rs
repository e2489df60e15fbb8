//! Small news to one peer, by datagram: a lost one costs a poll interval, never a job. So a full
//! mailbox of the socket loses them too, and counts it.

use std::sync::Arc;

use actix::prelude::*;
use arc_swap::ArcSwap;
use meshwork_protocol::id::NodeId;
use meshwork_protocol::wire::datagram::{Body, Writer};

use crate::identity::Identity;
use crate::mesh::gossip_socket::Transmit;
use crate::metrics::Metrics;
use crate::subscribers::MemberTable;

/// Sends hints to members by name.
#[derive(Clone)]
pub struct Hints {
    identity: Arc<Identity>,
    metrics: Arc<Metrics>,
    table: Arc<ArcSwap<MemberTable>>,
    transmit: Recipient<Transmit>,
}

impl Hints {
    /// Hints signed by `identity`, addressed by `table`.
    pub fn new(
        identity: Arc<Identity>,
        metrics: Arc<Metrics>,
        table: Arc<ArcSwap<MemberTable>>,
        transmit: Recipient<Transmit>,
    ) -> Self {
        Self { identity, metrics, table, transmit }
    }

    /// Sends `body` to `node` if it is present.
    pub fn send(&self, node: &NodeId, body: Body) {
        let table = self.table.load();
        if let Some(member) = table.get(node).filter(|m| m.is_present()) {
            let message = Writer::new(self.identity.sender(), body).finish();
            if self.transmit.try_send(Transmit { to: member.gossip, message }).is_err() {
                self.metrics.datagrams_dropped.increment();
            }
        }
    }
}
