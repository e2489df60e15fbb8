//! Jobs whose handlers run in worker processes: what crashes, leaks or spins there does so outside of
//! the node.
//!
//! The node hands an attempt over as a pass that is begun once; the job's own policy says whether and
//! when it is tried again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use meshwork_actors::fair::runner::{Attempt, Runner};
use meshwork_actors::host::pass::{Pass, PassOutcome, SubmitError};
use meshwork_actors::host::pass_client::{CallError, PassClient};
use meshwork_actors::host::registry::{PassCall, PassRegistry, RegisterError};
use meshwork_actors::work::enqueue::Job;
use meshwork_protocol::job::{AttemptEnd, RetryPolicy};
use meshwork_protocol::pass::ClosureId;
use serde::{Deserialize, Serialize};

use crate::handler::{JobError, JobOptions};

/// How an attempt ended, as the worker writes it.
#[derive(Serialize, Deserialize)]
enum Ended {
    Succeeded(String),
    Retry { error: String, after_ms: Option<u64> },
    Permanent(String),
    BadArguments(String),
}

impl From<AttemptEnd> for Ended {
    fn from(end: AttemptEnd) -> Self {
        match end {
            AttemptEnd::Succeeded(json) => Self::Succeeded(json.to_string()),
            AttemptEnd::Retry { error, after } => {
                let after_ms =
                    after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
                Self::Retry { error, after_ms }
            }
            AttemptEnd::BadArguments(error) => Self::BadArguments(error),
            AttemptEnd::Permanent(error) => Self::Permanent(error),
            // A worker's panics and time-outs end the pass, and never come here.
            other => Self::Permanent(format!("{other:?}")),
        }
    }
}

impl From<Ended> for AttemptEnd {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Succeeded(json) => Self::Succeeded(Arc::from(json)),
            Ended::Retry { error, after_ms } => {
                Self::Retry { error, after: after_ms.map(Duration::from_millis) }
            }
            Ended::Permanent(error) => Self::Permanent(error),
            Ended::BadArguments(error) => Self::BadArguments(error),
        }
    }
}

/// Registers handlers of jobs in a worker's registry.
pub trait RegisterJob {
    /// Registers a handler for jobs of kind `J`. It runs on the worker's thread, and may block it:
    /// that is what workers are for.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Taken`].
    fn register_job<J, F>(&self, handler: F) -> Result<ClosureId, RegisterError>
    where
        J: Job,
        F: Fn(J, &PassCall<'_>) -> Result<J::Output, JobError> + Send + Sync + 'static;
}

impl RegisterJob for PassRegistry {
    fn register_job<J, F>(&self, handler: F) -> Result<ClosureId, RegisterError>
    where
        J: Job,
        F: Fn(J, &PassCall<'_>) -> Result<J::Output, JobError> + Send + Sync + 'static,
    {
        self.register(&closure_name(J::NAME), move |call| {
            let end = match serde_json::from_slice::<J>(call.args) {
                Err(error) => AttemptEnd::BadArguments(error.to_string()),
                Ok(job) => match handler(job, call) {
                    Err(error) => error.into_end(),
                    Ok(output) => match serde_json::to_string(&output) {
                        Ok(json) => AttemptEnd::Succeeded(Arc::from(json)),
                        Err(error) => AttemptEnd::Permanent(format!(
                            "the result cannot be written as JSON: {error}"
                        )),
                    },
                },
            };
            serde_json::to_vec(&Ended::from(end)).map_err(|error| error.to_string())
        })
    }
}

/// Jobs and other closures may have one name.
fn closure_name(job: &str) -> String {
    format!("job:{job}")
}

/// Runs the attempts of one kind of job in worker processes.
pub(crate) struct WorkerRunner {
    closure: ClosureId,
    options: JobOptions,
    client: PassClient,
}

impl WorkerRunner {
    pub(crate) fn new(job: &str, options: JobOptions, client: PassClient) -> Self {
        Self { closure: ClosureId::of_name(&closure_name(job)), options, client }
    }
}

impl Runner for WorkerRunner {
    fn run(&self, attempt: Attempt) -> LocalBoxFuture<'static, AttemptEnd> {
        let (client, closure) = (self.client.clone(), self.closure);
        // The attempt's time-out drops the future; the worker that still runs it is killed then.
        let limit = self.options.limit();
        Box::pin(async move {
            let arguments = attempt.job.spec.arguments.as_bytes();
            let mut pass = Pass::new(closure, arguments).attempts(1);
            if let Some(limit) = limit {
                pass = pass.deadline(limit);
            }
            match client.call(&pass).await {
                Ok(end) => ended(end.outcome),
                Err(CallError::Submit(error @ SubmitError::TooLong { .. })) => {
                    AttemptEnd::Permanent(error.to_string())
                }
                Err(error) => retry(error),
            }
        })
    }

    fn timeout(&self) -> Option<Duration> {
        self.options.limit()
    }

    fn retry_policy(&self) -> RetryPolicy {
        self.options.retry_policy()
    }
}

fn ended(outcome: PassOutcome<'_>) -> AttemptEnd {
    match outcome {
        PassOutcome::Returned(bytes) => match serde_json::from_slice::<Ended>(&bytes) {
            Ok(ended) => ended.into(),
            Err(error) => AttemptEnd::Permanent(format!(
                "the worker answered what is no end of an attempt: {error}"
            )),
        },
        PassOutcome::Panicked(text) => AttemptEnd::Panicked(text.into_owned()),
        PassOutcome::TooLong(bytes) => AttemptEnd::Permanent(format!(
            "the result has {bytes} bytes, more than the passes of this machine carry"
        )),
        PassOutcome::Poisoned => retry("the worker process died while it ran the job"),
        PassOutcome::NoWorker => retry("no worker process of this machine has the handler"),
        PassOutcome::Failed(text) => AttemptEnd::Permanent(text.into_owned()),
        other => retry(format!("the pass ended as {other:?}")),
    }
}

fn retry(error: impl fmt::Display) -> AttemptEnd {
    AttemptEnd::Retry { error: error.to_string(), after: None }
}
