//! The order in which members are probed.

use crate::id::NodeId;

/// A shuffled order of the present members, each probed once before it is shuffled again.
#[derive(Debug, Default)]
pub(super) struct Round {
    order: Vec<NodeId>,
    next: usize,
}

impl Round {
    /// Puts a new member at a random place among those still to be probed.
    pub(super) fn insert(&mut self, rng: &mut fastrand::Rng, id: NodeId) {
        let at = rng.usize(self.next..=self.order.len());
        self.order.insert(at, id);
    }

    pub(super) fn remove(&mut self, id: &NodeId) {
        if let Some(at) = self.order.iter().position(|other| other == id) {
            self.order.remove(at);
            if at < self.next {
                self.next -= 1;
            }
        }
    }

    pub(super) fn advance(&mut self, rng: &mut fastrand::Rng) -> Option<NodeId> {
        if self.next == self.order.len() {
            rng.shuffle(&mut self.order);
            self.next = 0;
        }
        let id = self.order.get(self.next)?.clone();
        self.next += 1;
        Some(id)
    }
}
