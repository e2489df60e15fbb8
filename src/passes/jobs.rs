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
use meshwork_protocol::id::JobId;
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

/// Which attempt the arguments are for: the first line of what the worker is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Begun {
    id: JobId,
    attempt: u32,
    max_attempts: u32,
    token: u64,
}

impl Begun {
    fn of(attempt: &Attempt) -> Self {
        let job = &attempt.job;
        let (id, max_attempts) = (job.spec.id, job.spec.max_attempts);
        Self { id, attempt: job.attempt, max_attempts, token: job.token.0 }
    }

    /// The line, and the job's arguments after it.
    fn with(self, arguments: &str) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(&self).expect("numbers are JSON");
        bytes.push(b'\n');
        bytes.extend_from_slice(arguments.as_bytes());
        bytes
    }

    /// What [`with`](Self::with) wrote: JSON text has no newline of its own.
    fn read(bytes: &[u8]) -> Result<(Self, &[u8]), String> {
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("no line says which job")?;
        let begun = serde_json::from_slice(&bytes[..end]).map_err(|error| error.to_string())?;
        Ok((begun, &bytes[end + 1..]))
    }
}

/// What a job's handler in a worker process is given beside the job.
#[derive(Clone, Copy, Debug)]
pub struct JobCall<'a> {
    /// The job's id.
    pub id: JobId,
    /// Which attempt this is; 1 is the first.
    pub attempt: u32,
    /// How many attempts the job has.
    pub max_attempts: u32,
    /// What to fence writes with: greater whenever the job was claimed anew, by any node.
    pub fencing_token: u64,
    /// The pass that carries the attempt. Its own attempt is always the first.
    pub pass: &'a PassCall<'a>,
}

/// Registers handlers of jobs in a worker's registry.
pub trait RegisterJob {
    /// Registers a handler for jobs of kind `J`. It runs on the worker's thread, and may block it:
    /// that is what workers are for.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Taken`].
    fn register_job<J: Job>(
        &self,
        handler: impl Fn(J, &JobCall<'_>) -> Result<J::Output, JobError> + Send + Sync + 'static,
    ) -> Result<ClosureId, RegisterError>;
}

impl RegisterJob for PassRegistry {
    fn register_job<J: Job>(
        &self,
        handler: impl Fn(J, &JobCall<'_>) -> Result<J::Output, JobError> + Send + Sync + 'static,
    ) -> Result<ClosureId, RegisterError> {
        self.register(&closure_name(J::NAME), move |call| {
            let (begun, arguments) = Begun::read(call.args)?;
            let Begun { id, attempt, max_attempts, token } = begun;
            let call = JobCall { id, attempt, max_attempts, fencing_token: token, pass: call };
            let end = match serde_json::from_slice::<J>(arguments) {
                Err(error) => AttemptEnd::BadArguments(error.to_string()),
                Ok(job) => match handler(job, &call) {
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
            let arguments = Begun::of(&attempt).with(&attempt.job.spec.arguments);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_reads_which_attempt_it_runs() {
        let begun =
            Begun { id: JobId::from_bytes([7; 16]), attempt: 2, max_attempts: 5, token: 11 };
        let bytes = begun.with(r#"{"text":"a\nb"}"#);
        let (read, arguments) = Begun::read(&bytes).unwrap();
        assert_eq!((read, arguments), (begun, br#"{"text":"a\nb"}"#.as_slice()));
        assert_eq!(Begun::read(b"{}"), Err("no line says which job".into()));
        assert!(Begun::read(b"{}\n{}").unwrap_err().starts_with("missing field `id`"));
    }
}
