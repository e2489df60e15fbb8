//! Leases: how long a node's claims hold, without comparing two clocks.
//!
//! [`Keeper`] is the holder's side. It renews, and ends its own lease when the renewals stop getting
//! through. [`Observer`] is the reaper's side. It ends the leases that it saw stand still.
//! [`Orphans`] finds claims that the store has for this node and the node has no memory of.
//!
//! Invariant: a lease is reaped only after its holder's own deadline has passed. A renewal that the
//! store took was sent before anybody could see it, so the holder counts its term from an earlier
//! moment than any observer does. It counts less than a term, by what its clock may be slow; the
//! observer counts more than a term, by what its clock may be fast. And the reaping names the
//! renewals that were seen: a renewal in between makes it void.
//!
//! The invariant holds while any two clocks' rates differ by at most [`LeaseConfig::drift_ppm`] and
//! the clocks count the time that a machine is suspended. What the holder does in the last instant
//! before its deadline must be over within [`LeaseConfig::margin`].
//!
//! Source: Gray, Cheriton, *Leases* (SOSP 1989).

mod keeper;
mod observer;
mod orphans;

use std::time::Duration;

pub use keeper::{Keeper, KeeperEffect, LossReason, RenewOutcome};
pub use observer::{Observer, ObserverEffect, ReapOutcome};
pub use orphans::{Orphans, OrphansEffect};

use crate::time::micros;

/// How long leases hold. Every node of a mesh has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    term: Duration,
    drift_ppm: u32,
    margin: Duration,
}

/// Why a lease cannot be configured so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseConfigError {
    /// The term is too short for a timer, or so long that time would overflow.
    #[error("a lease term is between {TERM_MIN:?} and {TERM_MAX:?}, not {0:?}")]
    Term(Duration),
    /// Too little of the term is left to the holder.
    #[error(
        "drift and margin leave the holder {valid:?} of a term of {term:?}; it needs two thirds, \
         to renew every third"
    )]
    TooLittleLeft {
        /// The term.
        term: Duration,
        /// What is left of it.
        valid: Duration,
    },
}

/// Shortest term.
const TERM_MIN: Duration = Duration::from_millis(100);
/// Longest term: a day. Nobody waits longer for a dead node's jobs.
const TERM_MAX: Duration = Duration::from_secs(86_400);

impl LeaseConfig {
    /// Leases of `term`: from a holder's last sign of life until its jobs are given to others.
    /// Shorter is faster after a crash, and costs a write each third of it.
    ///
    /// `drift_ppm` bounds how much the rates of two nodes' clocks differ, in microseconds a second.
    /// `margin` is how long before the end the holder stops: at least the longest poll of a handler.
    ///
    /// # Errors
    /// [`LeaseConfigError`] when the term is under 100 ms or over a day, or when less than two thirds
    /// of it are left after drift and margin.
    pub fn new(term: Duration, drift_ppm: u32, margin: Duration) -> Result<Self, LeaseConfigError> {
        let config = Self { term, drift_ppm, margin };
        if !(TERM_MIN..=TERM_MAX).contains(&term) {
            return Err(LeaseConfigError::Term(term));
        }
        let valid = config.valid();
        if valid.saturating_mul(3) < term * 2 {
            return Err(LeaseConfigError::TooLittleLeft { term, valid });
        }
        Ok(config)
    }

    /// Leases of `term` with 1,000 ppm for drift (a quartz is good to 100, and a clock being
    /// corrected may run 500 off) and a twentieth of the term as margin.
    ///
    /// # Errors
    /// [`LeaseConfigError::Term`].
    pub fn with_term(term: Duration) -> Result<Self, LeaseConfigError> {
        Self::new(term, 1_000, term / 20)
    }

    /// The term.
    pub fn term(&self) -> Duration {
        self.term
    }

    /// How much the rates of two clocks may differ, in parts per million.
    pub fn drift_ppm(&self) -> u32 {
        self.drift_ppm
    }

    /// How long before the end of its term the holder stops.
    pub fn margin(&self) -> Duration {
        self.margin
    }

    /// How long the holder's lease is valid after a renewal was sent, by its clock.
    pub fn valid(&self) -> Duration {
        self.term.saturating_sub(self.drift()).saturating_sub(self.margin)
    }

    /// How long an observer must have seen a lease unchanged, by its clock.
    pub fn unchanged(&self) -> Duration {
        self.term + self.drift() + self.margin
    }

    /// Time between renewals, scans and the like: three in a term.
    pub fn period(&self) -> Duration {
        self.term / 3
    }

    /// Shortest time between two requests to the store for one purpose.
    fn spacing(&self) -> Duration {
        self.term / 15
    }

    /// What a clock may gain or lose on another in a term, rounded up.
    fn drift(&self) -> Duration {
        let drift =
            (u128::from(micros(self.term)) * u128::from(self.drift_ppm)).div_ceil(1_000_000);
        Duration::from_micros(u64::try_from(drift).unwrap_or(u64::MAX))
    }
}

impl Default for LeaseConfig {
    /// 15 s, 1,000 ppm, 750 ms.
    fn default() -> Self {
        Self::with_term(Duration::from_secs(15)).expect("15 s is in range")
    }
}

#[cfg(test)]
mod tests;
