//! Handlers as the executor sees them: by name, and without their types.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use meshwork_protocol::id::{HandlerName, NodeId};
use meshwork_protocol::job::{AttemptEnd, ClaimedJob, RetryPolicy};

/// Values that handlers share, one of each type.
#[derive(Clone, Default)]
pub struct Extensions(Arc<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Extensions {
    /// The given values.
    pub fn new(values: HashMap<TypeId, Arc<dyn Any + Send + Sync>>) -> Self {
        Self(Arc::new(values))
    }

    /// The value of type `T`.
    pub fn get<T: Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        self.0.get(&TypeId::of::<T>())?.clone().downcast().ok()
    }
}

/// What a handler is told of its attempt.
#[derive(Clone)]
pub struct Attempt {
    /// The job and the claim it runs by.
    pub job: Arc<ClaimedJob>,
    /// The node that runs it.
    pub node: NodeId,
    /// Whether this node stole it from another.
    pub stolen: bool,
    /// What handlers share.
    pub extensions: Extensions,
}

/// A registered handler.
pub trait Runner: Send + Sync {
    /// Runs one attempt. Dropping the future cancels it.
    fn run(&self, attempt: Attempt) -> LocalBoxFuture<'static, AttemptEnd>;
    /// How long an attempt may take; it is dropped then.
    fn timeout(&self) -> Option<Duration>;
    /// How failed attempts are repeated.
    fn retry_policy(&self) -> RetryPolicy;
}

/// The handlers of a node, by name.
pub type Handlers = BTreeMap<HandlerName, Arc<dyn Runner>>;
