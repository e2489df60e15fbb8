//! Time as the machines see it: microseconds since a start that the caller chose.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point in time: microseconds since an origin that one process, or one simulation, agrees on.
///
/// Never sent to another node: clocks of two nodes are not compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self(0);
    /// Later than any deadline: "never".
    pub const FAR_FUTURE: Self = Self(u64::MAX);

    /// The instant `us` microseconds after the origin.
    pub const fn from_micros(us: u64) -> Self {
        Self(us)
    }

    /// Microseconds since the origin.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Whole microseconds of `d`, saturating.
pub fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, d: Duration) -> Self {
        Self(self.0.saturating_add(micros(d)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, d: Duration) -> Self {
        Self(self.0.saturating_sub(micros(d)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let t = Instant::from_micros(5);
        assert_eq!(t - Duration::from_secs(1), Instant::ZERO);
        assert_eq!(t + Duration::MAX, Instant::FAR_FUTURE);
        assert_eq!(t.saturating_since(Instant::from_micros(7)), Duration::ZERO);
        assert_eq!((t + Duration::from_micros(3)).as_micros(), 8);
    }
}
