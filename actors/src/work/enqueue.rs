//! What a user sends to the deque's owner, and gets back.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use actix::prelude::*;
use meshwork_protocol::id::{HandlerName, JobId, NameError, Tenant};
use meshwork_protocol::limits::{ARGUMENT_BYTES_MAX, KEY_BYTES_MAX};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::clock::unix_ms;
use crate::store::messages::StoreError;

/// Jobs whose insert may be under way at once, and the largest batch; past it callers are told to
/// come back.
pub const INSERTS_MAX: usize = 1 << 16;

/// A kind of job: its arguments, the name of its handler, and what that returns.
///
/// Arguments and results are JSON in the store, so that people and other languages can read them.
pub trait Job: Serialize + DeserializeOwned + 'static {
    /// The handler's name, 1 to 64 bytes of visible text. It is stored with each job: to rename it
    /// is to orphan them.
    const NAME: &'static str;
    /// What a successful attempt returns.
    type Output: Serialize + DeserializeOwned + 'static;
}

/// Why a job was not accepted. Nothing was stored, except after [`EnqueueError::Store`], when it
/// may have been: send the same [`Enqueue`], with the same id, again.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// This node has no such handler, and was not told that another has.
    #[error(
        "no handler `{0}` on this node: register it with `.job(..)`, or `.job_elsewhere::<..>()` \
         if other nodes run it"
    )]
    UnknownHandler(HandlerName),
    /// The handler's name, the key or the tenant is not a name.
    #[error("{what}: {error}")]
    BadName {
        /// Which.
        what: &'static str,
        /// Why.
        error: NameError,
    },
    /// The key is too long.
    #[error("the key has {0} bytes, at most {KEY_BYTES_MAX} are allowed")]
    KeyTooLong(usize),
    /// The arguments are too large.
    #[error("the arguments have {0} bytes as JSON, at most {ARGUMENT_BYTES_MAX} are allowed")]
    ArgumentsTooLarge(usize),
    /// The arguments cannot be written as JSON.
    #[error("the arguments cannot be written as JSON: {0}")]
    NotJson(String),
    /// More jobs than one batch may have.
    #[error("a batch of {0} jobs, at most {INSERTS_MAX} are allowed: send several")]
    BatchTooLarge(usize),
    /// Too many enqueues wait for the store. Try again.
    #[error("the node is busy: {0} jobs wait to be stored")]
    Busy(usize),
    /// The node drains, or has stopped.
    #[error("the node accepts no more jobs: it is stopping")]
    Stopping,
    /// The store did not take it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl EnqueueError {
    /// Whether the same request may succeed later. It is safe to repeat.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Busy(_) => true,
            // A node that lost its lease registers anew, and goes on.
            Self::Store(StoreError::LeaseLost(_)) => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// A job to be accepted. The caller makes the id, so that a retry after a lost answer stores
/// nothing twice: keep the `Enqueue`, which can be cloned, and send it again.
pub struct Enqueue<J: Job> {
    request: Result<Request, EnqueueError>,
    job: PhantomData<fn() -> J>,
}

/// The same without its type.
#[derive(Clone, Debug)]
pub struct Request {
    /// The job's id.
    pub id: JobId,
    /// The handler.
    pub handler: HandlerName,
    /// JSON.
    pub arguments: Arc<str>,
    /// Places it on the hash ring.
    pub key: Option<Arc<str>>,
    /// Whose it is.
    pub tenant: Tenant,
    /// Higher runs first.
    pub priority: i16,
    /// Milliseconds since the Unix epoch; 0: at once.
    pub run_at_ms: u64,
    /// At least 1.
    pub max_attempts: u32,
    /// Never given to a thief.
    pub pinned: bool,
}

/// Attempts of a job that says nothing else.
pub const MAX_ATTEMPTS_DEFAULT: u32 = 5;

impl<J: Job> Enqueue<J> {
    /// A job with these arguments, a fresh id, the default tenant and priority 0, due at once. An
    /// argument that cannot be accepted is reported when it is sent.
    pub fn new(job: &J) -> Self {
        Self { request: Request::new(J::NAME, job), job: PhantomData }
    }

    /// Places it on the hash ring: jobs of one key run on one node while that has time for them.
    #[must_use]
    pub fn key(self, key: impl AsRef<str>) -> Self {
        let key = key.as_ref();
        self.change(|request| {
            if key.len() > KEY_BYTES_MAX {
                return Err(EnqueueError::KeyTooLong(key.len()));
            }
            request.key = Some(Arc::from(key));
            Ok(())
        })
    }

    /// Whose job it is.
    #[must_use]
    pub fn tenant(self, tenant: impl AsRef<str>) -> Self {
        self.change(|request| {
            request.tenant = Tenant::new(tenant)
                .map_err(|error| EnqueueError::BadName { what: "tenant", error })?;
            Ok(())
        })
    }

    /// Higher runs first; 0 without this.
    #[must_use]
    pub fn priority(self, priority: i16) -> Self {
        self.change(|request| {
            request.priority = priority;
            Ok(())
        })
    }

    /// Not before this time of day.
    #[must_use]
    pub fn run_at(self, time: SystemTime) -> Self {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.change(|request| {
            request.run_at_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
            Ok(())
        })
    }

    /// Not before this long from now.
    #[must_use]
    pub fn run_after(self, delay: Duration) -> Self {
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.change(|request| {
            request.run_at_ms = unix_ms().saturating_add(delay_ms);
            Ok(())
        })
    }

    /// Attempts before it is given up, at least 1; 5 without this.
    #[must_use]
    pub fn max_attempts(self, attempts: u32) -> Self {
        self.change(|request| {
            request.max_attempts = attempts.max(1);
            Ok(())
        })
    }

    /// Never given to a thief.
    #[must_use]
    pub fn pinned(self) -> Self {
        self.change(|request| {
            request.pinned = true;
            Ok(())
        })
    }

    /// With an id that the caller made.
    #[must_use]
    pub fn id(self, id: JobId) -> Self {
        self.change(|request| {
            request.id = id;
            Ok(())
        })
    }

    fn change(mut self, f: impl FnOnce(&mut Request) -> Result<(), EnqueueError>) -> Self {
        if let Ok(request) = &mut self.request
            && let Err(error) = f(request)
        {
            self.request = Err(error);
        }
        self
    }

    /// The request without its type, or what is wrong with it.
    ///
    /// # Errors
    /// [`EnqueueError`].
    pub fn into_request(self) -> Result<Request, EnqueueError> {
        self.request
    }
}

impl<J: Job> Clone for Enqueue<J> {
    fn clone(&self) -> Self {
        Self { request: self.request.clone(), job: PhantomData }
    }
}

impl<J: Job> fmt::Debug for Enqueue<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Enqueue").field(&self.request).finish()
    }
}

impl<J: Job> Message for Enqueue<J> {
    type Result = Result<Ticket<J>, EnqueueError>;
}

impl Request {
    /// A request for the handler called `name`.
    ///
    /// # Errors
    /// [`EnqueueError`] when the name or the arguments cannot be accepted.
    pub fn new<T: Serialize + ?Sized>(name: &str, arguments: &T) -> Result<Self, EnqueueError> {
        let handler = HandlerName::new(name)
            .map_err(|error| EnqueueError::BadName { what: "handler name", error })?;
        let arguments =
            serde_json::to_string(arguments).map_err(|e| EnqueueError::NotJson(e.to_string()))?;
        if arguments.len() > ARGUMENT_BYTES_MAX {
            return Err(EnqueueError::ArgumentsTooLarge(arguments.len()));
        }
        Ok(Self {
            id: new_job_id(),
            handler,
            arguments: Arc::from(arguments),
            key: None,
            tenant: Tenant::default_tenant(),
            priority: 0,
            run_at_ms: 0,
            max_attempts: MAX_ATTEMPTS_DEFAULT,
            pinned: false,
        })
    }
}

impl Request {
    /// Whether a request, however it was made, may be accepted.
    pub(crate) fn check(&self) -> Result<(), EnqueueError> {
        if self.arguments.len() > ARGUMENT_BYTES_MAX {
            return Err(EnqueueError::ArgumentsTooLarge(self.arguments.len()));
        }
        match &self.key {
            Some(key) if key.len() > KEY_BYTES_MAX => Err(EnqueueError::KeyTooLong(key.len())),
            _ => Ok(()),
        }
    }
}

/// Many jobs at once, of any kinds: all are stored, or none.
#[derive(Debug, Message)]
#[rtype(result = "Result<Vec<Accepted>, EnqueueError>")]
pub struct EnqueueBatch(pub Vec<Request>);

/// A job that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its id.
    pub id: JobId,
    /// Whether a job of this id was there before: nothing was stored now.
    pub duplicate: bool,
}

/// A claim check: the job is stored, and will have one outcome.
pub struct Ticket<J: Job> {
    id: JobId,
    duplicate: bool,
    job: PhantomData<fn() -> J>,
}

impl<J: Job> Ticket<J> {
    /// The ticket of the job with this id, for those who kept only that.
    pub fn of(id: JobId) -> Self {
        Self { id, duplicate: false, job: PhantomData }
    }

    pub(crate) fn accepted(accepted: Accepted) -> Self {
        Self { id: accepted.id, duplicate: accepted.duplicate, job: PhantomData }
    }

    /// The job's id.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// Whether a job of this id was there before: nothing was stored now.
    pub fn is_duplicate(&self) -> bool {
        self.duplicate
    }
}

impl<J: Job> Clone for Ticket<J> {
    fn clone(&self) -> Self {
        Self { id: self.id, duplicate: self.duplicate, job: PhantomData }
    }
}

impl<J: Job> fmt::Debug for Ticket<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({} {})", J::NAME, self.id)
    }
}

/// A fresh id.
pub fn new_job_id() -> JobId {
    let mut random = [0; 10];
    fastrand::fill(&mut random);
    JobId::from_parts(unix_ms(), random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Big(String);

    impl Job for Big {
        const NAME: &'static str = "big";
        type Output = ();
    }

    #[test]
    fn what_cannot_be_accepted_is_a_typed_error() {
        let over = Enqueue::new(&Big("x".repeat(ARGUMENT_BYTES_MAX))).into_request();
        assert!(matches!(over, Err(EnqueueError::ArgumentsTooLarge(n)) if n > ARGUMENT_BYTES_MAX));
        let key = Enqueue::new(&Big(String::new())).key("k".repeat(KEY_BYTES_MAX + 1));
        assert!(matches!(key.into_request(), Err(EnqueueError::KeyTooLong(257))));
        let tenant = Enqueue::new(&Big(String::new())).tenant("two words").into_request();
        assert!(matches!(tenant, Err(EnqueueError::BadName { what: "tenant", .. })));
        let largest = Big("x".repeat(ARGUMENT_BYTES_MAX - 2));
        assert!(Enqueue::new(&largest).into_request().is_ok());
    }

    #[test]
    fn ids_are_fresh() {
        let a = new_job_id();
        assert_ne!(a, new_job_id());
    }
}
