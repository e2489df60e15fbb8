//! The collector thread of a client: waits on the range's futex, and tells ends to who awaits them.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Weak};

use meshwork_protocol::pass::ClientIndex;
use meshwork_protocol::pass::patience::{Next, Patience, Spin};

use super::shared::{LOOK_EVERY, Shared};
use crate::clock::Clock;
use crate::host::parking::{pause, wait};
use crate::host::pass_ring::PassRing;

/// Batches after which the thread looks whether it should look at the slots themselves.
const BATCHES: u32 = 1_024;

impl Shared {
    /// Starts the thread, unless it runs.
    pub(super) fn start_collector(self: &Arc<Self>) -> io::Result<()> {
        if self.has_collector.load(Relaxed) || self.has_collector.swap(true, AcqRel) {
            return Ok(());
        }
        let (shared, ring) = (Arc::downgrade(self), Arc::clone(self.host.ring()));
        let (client, spin) = (self.range.client(), self.options.spin);
        std::thread::Builder::new()
            .name(format!("pass-collector-{}", client.0))
            .spawn(move || collect_forever(&shared, &ring, client, spin))
            .map(drop)
            // The next who needs it tries again.
            .inspect_err(|_| self.has_collector.store(false, Release))
    }
}

/// Ends with the client.
fn collect_forever(shared: &Weak<Shared>, ring: &PassRing, client: ClientIndex, spin: Spin) {
    let row = ring.client(client);
    let mut patience = Patience::new(spin);
    let mut rounds = 0u32;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        if !ring.is_here() {
            return;
        }
        rounds = rounds.wrapping_add(1);
        let is_time_to_sweep = rounds.is_multiple_of(BATCHES);
        if !is_time_to_sweep {
            if shared.range.has_news() {
                shared.collect_routed();
                patience.found(|| Clock.now());
                continue;
            }
            if let Next::Look { pauses } = patience.nothing(|| Clock.now()) {
                pause(pauses);
                continue;
            }
        }
        shared.sweep_if_due();
        let seen = row.wake_word().load(Acquire);
        // In the total order: `completions`. Whoever announces after this wakes; what was announced
        // before is seen by the look that follows.
        ring.board().client_falls_asleep(row.sleeping());
        let has_news = shared.range.has_news();
        drop(shared);
        if !has_news {
            wait(row.wake_word(), seen, LOOK_EVERY);
        }
        row.sleeping().swap(0, AcqRel);
    }
}
