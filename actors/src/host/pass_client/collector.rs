//! The collector thread of a client: waits on the range's futex, and tells ends to who awaits them.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Weak};

use meshwork_protocol::limits::PASS_LOOK_EVERY;
use meshwork_protocol::pass::ClientIndex;
use meshwork_protocol::pass::patience::{Next, Patience, Spin};

use super::shared::Shared;
use crate::clock::Clock;
use crate::host::parking::{pause, wait};
use crate::host::pass_ring::PassRing;
use crate::start::panic_text;

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
fn collect_forever(weak: &Weak<Shared>, ring: &PassRing, client: ClientIndex, spin: Spin) {
    let row = ring.client(client);
    let mut patience = Patience::new(spin);
    let mut rounds = 0u32;
    loop {
        let Some(shared) = weak.upgrade() else { return };
        if !ring.is_here() {
            return;
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(BATCHES) {
            shared.sweep_if_due();
        }
        if shared.range.has_news() {
            collect(&shared);
            patience.found(|| Clock.now());
            continue;
        }
        if let Next::Look { pauses } = patience.nothing(|| Clock.now()) {
            pause(pauses);
            continue;
        }
        shared.sweep_if_due();
        let seen = row.wake_word().load(Acquire);
        // In the total order: `completions`. Whoever announces after this wakes; what was announced
        // before is seen by the look that follows.
        ring.board().client_falls_asleep(row.sleeping());
        let has_news = shared.range.has_news();
        drop(shared);
        if !has_news {
            wait(row.wake_word(), seen, PASS_LOOK_EVERY);
        }
        // The row is another client's, once this one is gone.
        let Some(_client) = weak.upgrade() else { return };
        row.sleeping().swap(0, AcqRel);
    }
}

/// A sink that panics has had its ends, and is told of the next.
fn collect(shared: &Shared) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| shared.collect_routed())) {
        tracing::error!(reason = %panic_text(panic.as_ref()), "the sink of a pass client panicked");
    }
}
