//! What a client hands over, and what it gets back.

use std::borrow::Cow;
use std::time::Duration;

use meshwork_protocol::pass::frame::{FrameError, Status};
use meshwork_protocol::pass::slot::ATTEMPT_MAX;
use meshwork_protocol::pass::{ClosureId, PassId, Priority};

use super::pass_ring::Arrived;

/// How often a pass is begun at most, unless it says otherwise: twice more after a worker's death.
pub const ATTEMPTS: u8 = 3;

/// A call, to be run by a worker of any process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass<'a> {
    /// What to run.
    pub closure: ClosureId,
    /// Its arguments, up to the payload of the directory (64 KiB by default).
    pub args: Cow<'a, [u8]>,
    /// The caller's own mark: comes back with the reply, also to a client that adopts it.
    pub tag: u64,
    /// Before or after others.
    pub priority: Priority,
    /// How often it may be begun, 1 to 63: a pass whose workers die that often is poisoned.
    pub attempts: u8,
    /// How long one run may take. Past it, the worker's *process* is killed, and the pass counts as
    /// one whose worker died. Workers of the same process as a watchdog are spared by that one.
    pub deadline: Option<Duration>,
}

impl<'a> Pass<'a> {
    /// A pass with the defaults.
    pub fn new(closure: ClosureId, args: impl Into<Cow<'a, [u8]>>) -> Self {
        Self {
            closure,
            args: args.into(),
            tag: 0,
            priority: Priority::High,
            attempts: ATTEMPTS,
            deadline: None,
        }
    }

    /// A pass to a closure that is known by its name.
    pub fn named(name: &str, args: impl Into<Cow<'a, [u8]>>) -> Self {
        Self::new(ClosureId::of_name(name), args)
    }

    /// With this tag.
    #[must_use]
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// After all that is not.
    #[must_use]
    pub fn low_priority(mut self) -> Self {
        self.priority = Priority::Low;
        self
    }

    /// Begun so often at most; 0 counts as 1, and more than 63 as 63.
    #[must_use]
    pub fn attempts(mut self, attempts: u8) -> Self {
        self.attempts = attempts.clamp(1, ATTEMPT_MAX);
        self
    }

    /// With this limit for one run.
    #[must_use]
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }
}

/// What a pass came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PassOutcome<'a> {
    /// The closure's result.
    Returned(Cow<'a, [u8]>),
    /// The closure's error.
    Failed(Cow<'a, str>),
    /// What the closure panicked with.
    Panicked(Cow<'a, str>),
    /// The workers that began it died, as often as it may be begun.
    Poisoned,
    /// The result had so many bytes, which is more than a payload.
    TooLong(u64),
    /// No worker has the closure, for as long as the client waits for one. A dead one counts as there
    /// until somebody has buried it, which a watchdog does in milliseconds.
    NoWorker,
    /// Taken back before a worker claimed it.
    Cancelled,
    /// The slot held nonsense: something else wrote the file.
    Unreadable,
}

impl PassOutcome<'_> {
    /// The result, or what stands in its way, as an error.
    ///
    /// # Errors
    ///
    /// Every outcome but [`Returned`](Self::Returned).
    pub fn into_result(self) -> Result<Vec<u8>, PassError> {
        match self {
            Self::Returned(bytes) => Ok(bytes.into_owned()),
            Self::Failed(text) => Err(PassError::Failed(text.into_owned())),
            Self::Panicked(text) => Err(PassError::Panicked(text.into_owned())),
            Self::Poisoned => Err(PassError::Poisoned),
            Self::TooLong(bytes) => Err(PassError::TooLong(bytes)),
            Self::NoWorker => Err(PassError::NoWorker),
            Self::Cancelled => Err(PassError::Cancelled),
            Self::Unreadable => Err(PassError::Unreadable),
        }
    }

    /// The same, independent of shared memory.
    pub fn into_owned(self) -> PassOutcome<'static> {
        match self {
            Self::Returned(bytes) => PassOutcome::Returned(Cow::Owned(bytes.into_owned())),
            Self::Failed(text) => PassOutcome::Failed(Cow::Owned(text.into_owned())),
            Self::Panicked(text) => PassOutcome::Panicked(Cow::Owned(text.into_owned())),
            Self::Poisoned => PassOutcome::Poisoned,
            Self::TooLong(bytes) => PassOutcome::TooLong(bytes),
            Self::NoWorker => PassOutcome::NoWorker,
            Self::Cancelled => PassOutcome::Cancelled,
            Self::Unreadable => PassOutcome::Unreadable,
        }
    }
}

/// Why a pass has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    /// The closure returned an error.
    #[error("the closure failed: {0}")]
    Failed(String),
    /// The closure panicked.
    #[error("the closure panicked: {0}")]
    Panicked(String),
    /// Its workers died.
    #[error("the workers that ran it died, as often as it may be run")]
    Poisoned,
    /// More bytes than a payload.
    #[error("the result has {0} bytes, more than fit")]
    TooLong(u64),
    /// Nobody can run it.
    #[error("no living worker has the closure")]
    NoWorker,
    /// Taken back.
    #[error("it was cancelled")]
    Cancelled,
    /// Nonsense in the slot.
    #[error("the slot held nonsense: something else wrote the pass file")]
    Unreadable,
    /// The client is gone.
    #[error("the client has stopped")]
    Stopped,
}

impl PassError {
    /// Whether running the pass again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Poisoned | Self::NoWorker)
    }
}

/// The end of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    /// Which pass.
    pub pass: PassId,
    /// The mark that was put with it.
    pub tag: u64,
    /// Which run it was, from zero.
    pub attempt: u8,
    /// What it came to.
    pub outcome: PassOutcome<'a>,
}

impl Completion<'_> {
    /// The same, independent of shared memory.
    pub fn into_owned(self) -> Completion<'static> {
        Completion {
            pass: self.pass,
            tag: self.tag,
            attempt: self.attempt,
            outcome: self.outcome.into_owned(),
        }
    }
}

impl<'a> From<Arrived<'a>> for Completion<'a> {
    #[inline]
    fn from(arrived: Arrived<'a>) -> Self {
        let Arrived { pass, tag, attempt, reply, bytes } = arrived;
        let outcome = match reply {
            Ok(reply) if reply.status == Status::Returned => {
                PassOutcome::Returned(Cow::Borrowed(bytes))
            }
            other => not_returned(other.map(|reply| reply.status), bytes),
        };
        Self { pass, tag, attempt, outcome }
    }
}

#[cold]
fn not_returned(status: Result<Status, FrameError>, bytes: &[u8]) -> PassOutcome<'_> {
    match status {
        Ok(Status::Returned) => PassOutcome::Returned(Cow::Borrowed(bytes)),
        Ok(Status::Failed) => PassOutcome::Failed(String::from_utf8_lossy(bytes)),
        Ok(Status::Panicked) => PassOutcome::Panicked(String::from_utf8_lossy(bytes)),
        Ok(Status::Poisoned) => PassOutcome::Poisoned,
        Ok(Status::TooLong) => bytes.first_chunk().map_or(PassOutcome::Unreadable, |bytes| {
            PassOutcome::TooLong(u64::from_le_bytes(*bytes))
        }),
        Ok(Status::Unreadable) | Err(_) => PassOutcome::Unreadable,
    }
}

/// Why a pass was not accepted. Nothing was submitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// All slots of the client are in use: collect, or await room.
    #[error("all {0} slots of the client are in use")]
    Busy(u32),
    /// A batch of more passes than the client has slots.
    #[error("{passes} passes cannot be under way together: the client has {slots} slots")]
    TooMany {
        /// How many there are.
        passes: usize,
        /// How many can be under way.
        slots: u32,
    },
    /// More arguments than fit.
    #[error("the arguments have {bytes} bytes, and {limit} fit")]
    TooLong {
        /// How many there are.
        bytes: usize,
        /// How many fit.
        limit: usize,
    },
    /// The filesystem has no room for the slot's buffers.
    #[error("no memory for the pass's bytes: {0}")]
    NoSpace(std::io::Error),
    /// This process was forked from the one that opened the directory.
    #[error("this process was forked from the one that opened the passes: open them here anew")]
    Forked,
    /// The actor that would have submitted it has stopped.
    #[error("the submitter has stopped")]
    Stopped,
}

impl SubmitError {
    /// Whether submitting again later may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::NoSpace(_))
    }
}
