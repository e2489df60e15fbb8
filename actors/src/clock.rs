//! The clock of a node, as the protocol's machines see it.

use meshwork_protocol::time::Instant;

/// Reads the boot-time clock: monotonic, and it counts the time that the machine was suspended, so
/// that a lease is not thought valid after a long sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Microseconds since the machine booted.
    pub fn now(self) -> Instant {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let id = rustix::time::ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let id = rustix::time::ClockId::Monotonic;
        instant(rustix::time::clock_gettime(id))
    }

    /// The same to a few milliseconds, in a third of the time; it stands still while the machine is
    /// suspended. Not to be compared with [`now`](Self::now).
    pub fn coarse(self) -> Instant {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let id = rustix::time::ClockId::MonotonicCoarse;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let id = rustix::time::ClockId::Monotonic;
        instant(rustix::time::clock_gettime(id))
    }
}

fn instant(time: rustix::time::Timespec) -> Instant {
    let us = time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1_000;
    Instant::from_micros(us)
}

/// Milliseconds since the Unix epoch, for what people read and for what is due at a time of day.
pub fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
