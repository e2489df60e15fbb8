//! Handlers as a user writes them: async functions of a job, and of whatever else they ask for.

use std::any::type_name;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use meshwork_actors::fair::runner::{Attempt, Extensions, Runner};
use meshwork_actors::work::enqueue::Job;
use meshwork_protocol::id::{JobId, NodeId, Tenant};
use meshwork_protocol::job::{AttemptEnd, RetryPolicy};
use meshwork_protocol::limits::RESULT_BYTES_MAX;

/// Why an attempt failed.
///
/// Any error converts into one that asks for another attempt, so `?` works in handlers; say
/// [`JobError::permanent`] where no attempt will succeed.
#[derive(Clone, Debug)]
pub struct JobError {
    error: String,
    again: Again,
}

#[derive(Clone, Copy, Debug)]
enum Again {
    Backoff,
    After(Duration),
    Never,
}

impl JobError {
    /// Try again, after the handler's backoff, while the job has attempts left.
    pub fn retry(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), again: Again::Backoff }
    }

    /// Try again, not before `delay` from now, while the job has attempts left.
    pub fn retry_after(delay: Duration, error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), again: Again::After(delay) }
    }

    /// Do not try again.
    pub fn permanent(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), again: Again::Never }
    }

    pub(crate) fn into_end(self) -> AttemptEnd {
        match self.again {
            Again::Backoff => AttemptEnd::Retry { error: self.error, after: None },
            Again::After(delay) => AttemptEnd::Retry { error: self.error, after: Some(delay) },
            Again::Never => AttemptEnd::Permanent(self.error),
        }
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

impl<E: std::error::Error> From<E> for JobError {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

/// A value that handlers share, given to the builder with `.data(..)`.
pub struct Data<T: ?Sized>(Arc<T>);

impl<T> Data<T> {
    /// Wraps a value, for tests of a handler.
    pub fn new(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T: ?Sized> Data<T> {
    /// The shared value.
    pub fn into_inner(self) -> Arc<T> {
        self.0
    }
}

impl<T: ?Sized> Clone for Data<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: ?Sized> Deref for Data<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Data<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a handler may want to know of its attempt.
#[derive(Clone)]
pub struct JobContext(Attempt);

impl JobContext {
    /// The job's id.
    pub fn id(&self) -> JobId {
        self.0.job.spec.id
    }

    /// Which attempt this is; 1 is the first.
    pub fn attempt(&self) -> u32 {
        self.0.job.attempt
    }

    /// How many attempts the job has.
    pub fn max_attempts(&self) -> u32 {
        self.0.job.spec.max_attempts
    }

    /// The key that placed it, if it has one.
    pub fn key(&self) -> Option<&str> {
        self.0.job.spec.key.as_deref()
    }

    /// Whose job it is.
    pub fn tenant(&self) -> &Tenant {
        &self.0.job.spec.tenant
    }

    /// The node that runs it.
    pub fn node(&self) -> &NodeId {
        &self.0.node
    }

    /// The node that accepted it.
    pub fn origin(&self) -> &NodeId {
        &self.0.job.spec.origin
    }

    /// Whether the node stole it from another.
    pub fn is_stolen(&self) -> bool {
        self.0.stolen
    }
}

impl fmt::Debug for JobContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.id();
        f.debug_struct("JobContext").field("id", &id).field("attempt", &self.attempt()).finish()
    }
}

/// What a handler can take beside its job.
pub trait FromAttempt: Sized + 'static {
    /// What is missing for it, if anything is; asked when the node starts.
    fn missing(extensions: &Extensions) -> Option<&'static str>;
    /// The value for one attempt.
    fn from_attempt(attempt: &Attempt) -> Option<Self>;
}

impl FromAttempt for JobContext {
    fn missing(_: &Extensions) -> Option<&'static str> {
        None
    }

    fn from_attempt(attempt: &Attempt) -> Option<Self> {
        Some(Self(attempt.clone()))
    }
}

impl<T: Send + Sync + 'static> FromAttempt for Data<T> {
    fn missing(extensions: &Extensions) -> Option<&'static str> {
        extensions.get::<T>().is_none().then(type_name::<T>)
    }

    fn from_attempt(attempt: &Attempt) -> Option<Self> {
        attempt.extensions.get().map(Self)
    }
}

/// An async function that runs jobs of one kind.
///
/// It takes the job, then up to five values that implement [`FromAttempt`], and returns
/// `Result<J::Output, JobError>`. Its future need not be `Send`.
pub trait JobHandler<J: Job, Args>: Clone + Send + Sync + 'static {
    /// What is missing for its arguments, if anything is.
    fn missing(extensions: &Extensions) -> Option<&'static str>;
    /// Runs one attempt.
    fn call(
        &self,
        job: J,
        attempt: &Attempt,
    ) -> LocalBoxFuture<'static, Result<J::Output, JobError>>;
}

macro_rules! job_handler {
    ($($arg:ident),*) => {
        impl<J, F, Fut, $($arg,)*> JobHandler<J, ($($arg,)*)> for F
        where
            J: Job,
            F: Fn(J, $($arg),*) -> Fut + Clone + Send + Sync + 'static,
            Fut: Future<Output = Result<J::Output, JobError>> + 'static,
            $($arg: FromAttempt,)*
        {
            #[allow(unused_variables, reason = "a handler may take nothing but its job")]
            fn missing(extensions: &Extensions) -> Option<&'static str> {
                $(if let Some(missing) = $arg::missing(extensions) {
                    return Some(missing);
                })*
                None
            }

            #[allow(unused_variables, non_snake_case, reason = "a macro over the type parameters")]
            fn call(
                &self,
                job: J,
                attempt: &Attempt,
            ) -> LocalBoxFuture<'static, Result<J::Output, JobError>> {
                $(let Some($arg) = $arg::from_attempt(attempt) else {
                    let what = type_name::<$arg>();
                    let error = JobError::permanent(format!("{what} is not there"));
                    return Box::pin(async move { Err(error) });
                };)*
                self(job, $($arg),*).boxed_local()
            }
        }
    };
}

job_handler!();
job_handler!(A);
job_handler!(A, B);
job_handler!(A, B, C);
job_handler!(A, B, C, D);
job_handler!(A, B, C, D, E);

/// How a handler's attempts are bounded and repeated.
#[derive(Clone, Copy, Debug)]
pub struct JobOptions {
    timeout: Option<Duration>,
    retry: RetryPolicy,
}

/// Time that an attempt has without [`JobOptions::timeout`].
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(15 * 60);

impl Default for JobOptions {
    fn default() -> Self {
        Self { timeout: Some(TIMEOUT_DEFAULT), retry: RetryPolicy::default() }
    }
}

impl JobOptions {
    /// An attempt may take 15 minutes; the backoff is 1 s, doubling, an hour at most.
    pub fn new() -> Self {
        Self::default()
    }

    /// An attempt that takes longer is dropped at its next await, and counts as failed.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// An attempt may take for ever.
    #[must_use]
    pub fn no_timeout(mut self) -> Self {
        self.timeout = None;
        self
    }

    /// The delay after the first failed attempt, which doubles with each further one up to `max`.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.retry = RetryPolicy { backoff: first, backoff_max: max };
        self
    }
}

impl JobOptions {
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.timeout
    }

    pub(crate) fn retry_policy(&self) -> RetryPolicy {
        self.retry
    }
}

pub(crate) struct TypedRunner<J, Args, H> {
    handler: H,
    options: JobOptions,
    types: PhantomData<fn() -> (J, Args)>,
}

impl<J: Job, Args, H: JobHandler<J, Args>> TypedRunner<J, Args, H> {
    pub(crate) fn new(handler: H, options: JobOptions) -> Self {
        Self { handler, options, types: PhantomData }
    }
}

impl<J: Job, Args: 'static, H: JobHandler<J, Args>> Runner for TypedRunner<J, Args, H> {
    fn run(&self, attempt: Attempt) -> LocalBoxFuture<'static, AttemptEnd> {
        let job = match serde_json::from_str::<J>(&attempt.job.spec.arguments) {
            Ok(job) => job,
            Err(e) => {
                let end = AttemptEnd::BadArguments(e.to_string());
                return Box::pin(async move { end });
            }
        };
        let run = self.handler.call(job, &attempt);
        Box::pin(async move {
            match run.await {
                Err(error) => error.into_end(),
                Ok(output) => match serde_json::to_string(&output) {
                    Ok(json) if json.len() <= RESULT_BYTES_MAX => {
                        AttemptEnd::Succeeded(Arc::from(json))
                    }
                    Ok(json) => AttemptEnd::Permanent(format!(
                        "the result has {} bytes as JSON, at most {RESULT_BYTES_MAX} are allowed",
                        json.len()
                    )),
                    Err(e) => {
                        AttemptEnd::Permanent(format!("the result cannot be written as JSON: {e}"))
                    }
                },
            }
        })
    }

    fn timeout(&self) -> Option<Duration> {
        self.options.timeout
    }

    fn retry_policy(&self) -> RetryPolicy {
        self.options.retry
    }
}
