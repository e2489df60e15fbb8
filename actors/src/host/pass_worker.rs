//! `PassWorker`: the workers of this process.
//!
//! Owns the worker threads and the registry of their closures. Receives [`RegisterPass`],
//! [`AddWorkers`] and [`StopWorkers`]. On death the node stops; the threads end after the pass that each runs.

use std::sync::Arc;

use actix::prelude::*;
use meshwork_protocol::pass::{ClosureId, WorkerIndex};

use super::pass_host::{JoinError, PassHost};
use super::registry::{PassRegistry, RegisterError, Registered};
use super::worker_thread::{WorkerOptions, WorkerThread};

/// Register a closure: the workers of this process take passes of it from now on.
#[derive(Message)]
#[rtype(result = "Result<(), RegisterError>")]
pub struct RegisterPass {
    /// Its id.
    pub id: ClosureId,
    /// Its name and what it does.
    pub closure: Registered,
}

/// Start so many workers more.
#[derive(Message)]
#[rtype(result = "Result<Vec<WorkerIndex>, JoinError>")]
pub struct AddWorkers(pub usize);

/// Tell every worker to end after the pass that it runs. Answered when all have.
#[derive(Message)]
#[rtype(result = "()")]
pub struct StopWorkers;

/// The actor.
pub struct PassWorker {
    host: Arc<PassHost>,
    registry: PassRegistry,
    options: WorkerOptions,
    threads: Vec<WorkerThread>,
}

impl PassWorker {
    /// Workers that run already, and whose closures these are.
    pub fn new(
        host: Arc<PassHost>,
        registry: PassRegistry,
        options: WorkerOptions,
        threads: Vec<WorkerThread>,
    ) -> Self {
        Self { host, registry, options, threads }
    }

    /// Starts so many worker threads: all, or none.
    ///
    /// # Errors
    ///
    /// [`JoinError`]; those that had started have ended.
    pub fn threads(
        host: &Arc<PassHost>,
        registry: &PassRegistry,
        options: &WorkerOptions,
        count: usize,
    ) -> Result<Vec<WorkerThread>, JoinError> {
        let mut threads = Vec::new();
        for _ in 0..count {
            match WorkerThread::spawn(host, registry.clone(), options) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    threads.iter().for_each(WorkerThread::stop);
                    threads.into_iter().for_each(WorkerThread::join);
                    return Err(error);
                }
            }
        }
        Ok(threads)
    }
}

impl Actor for PassWorker {
    type Context = Context<Self>;
}

impl Handler<RegisterPass> for PassWorker {
    type Result = Result<(), RegisterError>;

    fn handle(
        &mut self,
        RegisterPass { id, closure }: RegisterPass,
        _: &mut Context<Self>,
    ) -> Self::Result {
        self.registry.insert(id, &closure.name, closure.run)
    }
}

impl Handler<AddWorkers> for PassWorker {
    type Result = Result<Vec<WorkerIndex>, JoinError>;

    fn handle(&mut self, AddWorkers(count): AddWorkers, _: &mut Context<Self>) -> Self::Result {
        let added = Self::threads(&self.host, &self.registry, &self.options, count)?;
        let indices = added.iter().map(WorkerThread::index).collect();
        self.threads.extend(added);
        Ok(indices)
    }
}

impl Handler<StopWorkers> for PassWorker {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: StopWorkers, _: &mut Context<Self>) -> Self::Result {
        let threads = std::mem::take(&mut self.threads);
        threads.iter().for_each(WorkerThread::stop);
        Box::pin(async move {
            let joined =
                tokio::task::spawn_blocking(|| threads.into_iter().for_each(WorkerThread::join));
            if let Err(error) = joined.await {
                tracing::error!(%error, "the workers cannot be waited for");
            }
        })
    }
}
