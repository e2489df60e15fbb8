//! What every store decides alike: when a job is due, what a crash costs it, which boot is next.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use meshwork_protocol::id::Generation;
use meshwork_protocol::job::{JobSpec, JobState};

use super::limits::CRASH_BUDGET;
use super::messages::{StoreError, StoreResult};

/// The greatest number that every database can hold.
pub(super) const NUMBER_MAX: u64 = i64::MAX as u64;

/// The error that an interrupted job shows until it is run again.
pub(super) const INTERRUPTED: &str = "interrupted by the crash of its node";

/// The wall clock, in milliseconds since the Unix epoch.
///
/// It decides when scheduled and failed jobs are due and orders jobs by age; no lease depends on it.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl WallClock {
    /// A clock that reads `now_ms`.
    pub fn new(now_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now_ms))
    }

    /// The time now.
    pub(super) fn now_ms(&self) -> u64 {
        (self.0)().min(NUMBER_MAX)
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WallClock({})", self.now_ms())
    }
}

/// The state of a new job that nobody claims, and when it is, or became, due.
///
/// A job that is due at once counts as due from now, whatever its `run_at_ms`: nobody gets ahead of
/// older jobs by a date in the past.
pub(super) fn first_state(spec: &JobSpec, now_ms: u64) -> (JobState, u64) {
    if spec.run_at_ms > now_ms {
        (JobState::Scheduled, spec.run_at_ms.min(NUMBER_MAX))
    } else {
        (JobState::Queued, now_ms)
    }
}

/// What the crash of its node makes of a job that was running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Interruption {
    /// It is queued again.
    Requeued,
    /// It is dead, for this reason.
    Dead(String),
}

/// How a store treats jobs whose node crashed.
///
/// An interrupted attempt is spent: it counts among the attempts begun. Apart from that each crash is
/// charged to the jobs that were running, and to them alone; jobs that waited in the node's deque are
/// not charged. A job whose charges reach the budget is dead. Attempts that ended by the handler's
/// own doing are bounded by the job's `max_attempts`, crashes by the budget: a job is begun fewer than
/// `max_attempts + crash_budget` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashRule {
    /// Crashes that may be charged to a job before it is dead, at least 1.
    pub crash_budget: u32,
}

impl Default for CrashRule {
    fn default() -> Self {
        Self { crash_budget: CRASH_BUDGET }
    }
}

impl CrashRule {
    /// What becomes of a running job when its node crashes for the `crashes`th time.
    pub(super) fn interrupt(self, crashes: u32) -> Interruption {
        if crashes < self.crash_budget {
            Interruption::Requeued
        } else {
            let times = if crashes == 1 { "once".into() } else { format!("{crashes} times") };
            Interruption::Dead(format!("{INTERRUPTED} {times}"))
        }
    }
}

/// The generation of the boot after `previous` (0: there was none).
pub(super) fn next_generation(previous: u64, at_least: Generation) -> StoreResult<Generation> {
    let next = Generation(previous).next().max(at_least);
    if next.0 > NUMBER_MAX {
        return Err(StoreError::Unusable(format!(
            "no generation as great as {next} can be stored"
        )));
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_was_running_at_three_crashes_is_dead() {
        let rule = CrashRule::default();
        assert_eq!(rule.interrupt(1), Interruption::Requeued);
        assert_eq!(rule.interrupt(2), Interruption::Requeued);
        assert_eq!(
            rule.interrupt(3),
            Interruption::Dead("interrupted by the crash of its node 3 times".into())
        );
        assert_eq!(
            CrashRule { crash_budget: 1 }.interrupt(1),
            Interruption::Dead("interrupted by the crash of its node once".into())
        );
    }

    #[test]
    fn a_generation_follows_the_last_and_what_the_mesh_has_seen() {
        assert_eq!(next_generation(0, Generation(0)), Ok(Generation(1)));
        assert_eq!(next_generation(7, Generation(3)), Ok(Generation(8)));
        assert_eq!(next_generation(7, Generation(90)), Ok(Generation(90)));
        assert!(matches!(next_generation(7, Generation(u64::MAX)), Err(StoreError::Unusable(_))));
        assert!(matches!(next_generation(NUMBER_MAX, Generation(0)), Err(StoreError::Unusable(_))));
    }
}
