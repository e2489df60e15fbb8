//! Who submits looks for the reply itself, while replies come sooner than a thread is woken.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Release, SeqCst};
use std::time::Instant;

use meshwork_protocol::pass::patience::Hope;

use super::shared::{Shared, lock};

/// Between two looks at the clock, so many at the completions.
const LOOKS: u32 = 8;

/// The collector thread's part, taken over for a while. Given back when dropped.
pub struct Attention {
    shared: Arc<Shared>,
    /// Whether that thread slept.
    slept: bool,
    found: bool,
    last: Instant,
}

impl Attention {
    pub(super) fn new(shared: &Arc<Shared>) -> Option<Self> {
        if shared.calls.load(SeqCst) > 0
            || !lock(&shared.hope).is_worth_it()
            || shared.attended.swap(true, SeqCst)
        {
            return None;
        }
        // While this one looks, nobody need be woken for it.
        let sleeping = shared.host.ring().client(shared.range.client()).sleeping();
        let slept = sleeping.swap(0, SeqCst) != 0;
        let attention =
            Self { shared: Arc::clone(shared), slept, found: false, last: Instant::now() };
        // A call that began before it was attended is given back to the thread; one that begins
        // later wakes it.
        (shared.calls.load(SeqCst) == 0).then_some(attention)
    }

    /// Collects what is there. Whether to look again soon: until nothing came for a few microseconds,
    /// or nothing is under way.
    pub fn look(&mut self) -> bool {
        for _ in 0..LOOKS {
            if self.shared.range.has_news() {
                self.shared.collect_routed();
                self.found = true;
                self.last = Instant::now();
                return self.shared.under_way() > 0;
            }
            std::hint::spin_loop();
        }
        Hope::goes_on(self.last.elapsed())
    }
}

impl Drop for Attention {
    fn drop(&mut self) {
        let shared = &*self.shared;
        if !shared.host.ring().is_here() {
            return;
        }
        if self.slept {
            let ring = shared.host.ring();
            ring.board().client_falls_asleep(ring.client(shared.range.client()).sleeping());
            if shared.range.has_news() {
                shared.collect_routed();
            }
        }
        lock(&shared.hope).ended(self.found);
        shared.attended.store(false, Release);
    }
}
