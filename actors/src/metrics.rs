//! Counters, all lock-free.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The counters of a node, written by its actors.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $($(#[$doc])* pub $name: Counter,)*
        }

        /// The counters as they were at one moment; each is read atomically.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub struct MetricsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Metrics {
            /// Reads every counter.
            pub fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot { $($name: self.$name.value(),)* }
            }
        }

        impl MetricsSnapshot {
            /// Names and values, in order of declaration.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Claims that brought at least one job from the store.
    prefetch_count,
    /// Jobs that came with them.
    prefetch_jobs,
    /// Jobs popped from the deque to run here.
    local_pops,
    /// Steal requests sent.
    steals_initiated,
    /// Steal requests that brought at least one job.
    steals_succeeded,
    /// Jobs that came with them.
    jobs_stolen_in,
    /// Jobs that thieves transferred from here.
    jobs_stolen_out,
    /// Hash rings computed after a change of membership.
    ring_recalculations,
    /// Attempts started here.
    jobs_started,
    /// Jobs that succeeded here.
    jobs_succeeded,
    /// Jobs that failed for good here.
    jobs_failed,
    /// Attempts that failed here and are to be repeated.
    jobs_retried,
    /// Jobs of dead nodes that this node requeued.
    jobs_requeued,
    /// Leases of dead nodes that this node reaped.
    leases_reaped,
    /// Leases that this node lost.
    leases_lost,
    /// Datagrams sent.
    datagrams_sent,
    /// Datagrams received that were this mesh's.
    datagrams_received,
    /// Datagrams dropped because they were foreign, malformed, or of another mesh.
    datagrams_refused,
    /// Datagrams dropped because this node, or the network under it, could not keep up.
    datagrams_dropped,
    /// Size of the largest datagram sent, in bytes.
    datagram_bytes_max,
    /// Streams closed because of what the peer sent, or did not send or take in time.
    streams_refused,
}

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds `n`.
    pub fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Raises it to `n` if it is less.
    pub fn raise(&self, n: usize) {
        self.0.fetch_max(n as u64, Ordering::Relaxed);
    }

    /// Its value.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
