//! Jobs: what is accepted, what is claimed, and what an attempt's end means.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize};

use crate::id::{FencingToken, HandlerName, JobId, NodeId, Tenant};
use crate::limits::ERROR_BYTES_MAX;

/// Everything about a job that never changes after it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Its id.
    pub id: JobId,
    /// Who runs it.
    pub handler: HandlerName,
    /// Its arguments, as JSON text.
    #[serde(deserialize_with = "shared_text")]
    pub arguments: Arc<str>,
    /// Places it on the hash ring; without one it belongs to the node that accepted it.
    #[serde(default, deserialize_with = "optional_text")]
    pub key: Option<Arc<str>>,
    /// Whose it is.
    pub tenant: Tenant,
    /// Higher runs first.
    pub priority: i16,
    /// Not before this time, in milliseconds since the Unix epoch; 0: at once.
    pub run_at_ms: u64,
    /// Attempts before it is given up, at least 1.
    pub max_attempts: u32,
    /// Never given to a thief.
    pub pinned: bool,
    /// The node that accepted it, and awaits its outcome if anyone does.
    pub origin: NodeId,
    /// When it was accepted, in milliseconds since the Unix epoch, for people to read.
    pub enqueued_ms: u64,
}

/// Reads a text from where it lies: a length that only announces one allocates nothing.
fn shared_text<'de, D: Deserializer<'de>>(d: D) -> Result<Arc<str>, D::Error> {
    struct Text;

    impl Visitor<'_> for Text {
        type Value = Arc<str>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E>(self, text: &str) -> Result<Arc<str>, E> {
            Ok(Arc::from(text))
        }
    }

    d.deserialize_str(Text)
}

fn optional_text<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Arc<str>>, D::Error> {
    #[derive(Deserialize)]
    struct Text(#[serde(deserialize_with = "shared_text")] Arc<str>);

    Ok(Option::deserialize(d)?.map(|Text(text)| text))
}

/// A job that some owner may run, by the right of its token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedJob {
    /// The job.
    pub spec: Arc<JobSpec>,
    /// The right to it; every write to the job names it.
    pub token: FencingToken,
    /// The attempt that the next run will be: 1 for the first.
    pub attempt: u32,
}

impl ClaimedJob {
    /// Names the claim in a message to the store or to a peer.
    pub fn claim(&self) -> Claim {
        Claim { job: self.spec.id, token: self.token }
    }
}

/// A claim by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// The token under which the claim is held.
    pub token: FencingToken,
}

/// The state of a job in the store. The numbers are the store's and never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
#[non_exhaustive]
pub enum JobState {
    /// Not due yet.
    Scheduled = 0,
    /// Due, and nobody's.
    Queued = 1,
    /// In a node's deque, or on the way to one.
    Claimed = 2,
    /// A handler was started.
    Running = 3,
    /// Final: it returned a result.
    Succeeded = 4,
    /// An attempt failed; the next is due at its `run_at`.
    Failed = 5,
    /// Final: it failed for good.
    Dead = 6,
    /// Final: withdrawn before it ran.
    Cancelled = 7,
}

impl JobState {
    /// Every state, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Scheduled,
        Self::Queued,
        Self::Claimed,
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::Dead,
        Self::Cancelled,
    ];

    /// The state with this number.
    pub fn from_number(n: u8) -> Option<Self> {
        Self::ALL.get(usize::from(n)).copied()
    }

    /// Its number in the store.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Whether nothing follows it.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Dead | Self::Cancelled)
    }

    /// Its name, as tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Queued => "queued",
            Self::Claimed => "claimed",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How one attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttemptEnd {
    /// The handler returned a result, as JSON text.
    Succeeded(Arc<str>),
    /// The handler asked for another attempt.
    Retry {
        /// Why.
        error: String,
        /// Not before this long from now; without it the policy's backoff.
        after: Option<Duration>,
    },
    /// The handler says that no attempt will succeed.
    Permanent(String),
    /// The arguments are not what the handler takes.
    BadArguments(String),
    /// The handler panicked.
    Panicked(String),
    /// The handler did not return in time, and was dropped.
    TimedOut(Duration),
}

/// What becomes of a job after an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Final: it succeeded, with this JSON text.
    Succeeded(Arc<str>),
    /// Another attempt, this long from now.
    RetryAfter {
        /// The delay.
        delay: Duration,
        /// Why.
        error: String,
    },
    /// Final: it failed, for this reason.
    Dead(String),
}

/// How often and how fast a job is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Delay after the first failed attempt; it doubles with each further one.
    pub backoff: Duration,
    /// The delay grows no further than this.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { backoff: Duration::from_secs(1), backoff_max: Duration::from_secs(3_600) }
    }
}

impl RetryPolicy {
    /// What becomes of a job whose attempt number `attempt` of `max_attempts` ended so.
    ///
    /// A panic is a bug and bad arguments stay bad: neither is tried again. A time-out is tried
    /// again, like a handler's own request.
    pub fn decide(&self, attempt: u32, max_attempts: u32, end: AttemptEnd) -> Disposition {
        let (error, after) = match end {
            AttemptEnd::Succeeded(result) => return Disposition::Succeeded(result),
            AttemptEnd::Permanent(error) => return Disposition::Dead(cut(error)),
            AttemptEnd::BadArguments(error) => {
                return Disposition::Dead(cut(format!("arguments do not decode: {error}")));
            }
            AttemptEnd::Panicked(error) => {
                return Disposition::Dead(cut(format!("handler panicked: {error}")));
            }
            AttemptEnd::TimedOut(limit) => (format!("handler timed out after {limit:?}"), None),
            AttemptEnd::Retry { error, after } => (error, after),
        };
        if attempt >= max_attempts {
            let error = if max_attempts > 1 {
                format!("{error} (attempt {attempt} of {max_attempts})")
            } else {
                error
            };
            return Disposition::Dead(cut(error));
        }
        let doublings = attempt.saturating_sub(1).min(30);
        let delay = after
            .unwrap_or_else(|| self.backoff.saturating_mul(1 << doublings).min(self.backoff_max));
        Disposition::RetryAfter { delay, error: cut(error) }
    }
}

/// Cuts an error to its bound, at a character.
fn cut(mut error: String) -> String {
    if error.len() > ERROR_BYTES_MAX {
        let mut end = ERROR_BYTES_MAX - '…'.len_utf8();
        while !error.is_char_boundary(end) {
            end -= 1;
        }
        error.truncate(end);
        error.push('…');
    }
    error
}

/// What a job came to: its final state, as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Recorded {
    /// It returned this JSON text.
    Succeeded(Arc<str>),
    /// It failed for good.
    Dead {
        /// Why.
        error: String,
        /// After how many attempts.
        attempts: u32,
    },
    /// It was withdrawn before it ran.
    Cancelled,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry(error: &str) -> AttemptEnd {
        AttemptEnd::Retry { error: error.into(), after: None }
    }

    #[test]
    fn retries_back_off_by_doubling_up_to_the_cap_and_then_end() {
        let policy =
            RetryPolicy { backoff: Duration::from_secs(1), backoff_max: Duration::from_secs(5) };
        let delays: Vec<_> = (1..6)
            .map(|attempt| match policy.decide(attempt, 5, retry("io")) {
                Disposition::RetryAfter { delay, .. } => Some(delay.as_secs()),
                _ => None,
            })
            .collect();
        assert_eq!(delays, [Some(1), Some(2), Some(4), Some(5), None]);
        assert_eq!(
            policy.decide(5, 5, retry("io")),
            Disposition::Dead("io (attempt 5 of 5)".into())
        );
    }

    #[test]
    fn what_cannot_succeed_is_not_tried_again() {
        let policy = RetryPolicy::default();
        for (end, says) in [
            (AttemptEnd::Permanent("no such file".into()), "no such file"),
            (
                AttemptEnd::BadArguments("missing field".into()),
                "arguments do not decode: missing field",
            ),
            (AttemptEnd::Panicked("boom".into()), "handler panicked: boom"),
        ] {
            assert_eq!(policy.decide(1, 10, end), Disposition::Dead(says.into()));
        }
        assert!(matches!(
            policy.decide(1, 2, AttemptEnd::TimedOut(Duration::from_secs(1))),
            Disposition::RetryAfter { .. }
        ));
    }

    #[test]
    fn long_errors_are_cut_at_a_character() {
        let Disposition::Dead(error) =
            RetryPolicy::default().decide(1, 1, AttemptEnd::Permanent("é".repeat(5_000)))
        else {
            panic!("a permanent error is final");
        };
        assert!(error.len() <= ERROR_BYTES_MAX && error.ends_with('…'));
    }

    #[test]
    fn state_numbers_read_back() {
        for state in JobState::ALL {
            assert_eq!(JobState::from_number(state.number()), Some(state));
        }
        assert_eq!(JobState::from_number(8), None);
    }
}
