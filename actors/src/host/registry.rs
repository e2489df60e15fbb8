//! The closures that a process runs passes of, by id and by name.
//!
//! A closure may use the registry while it runs, to run another closure or to register one: no lock
//! is held during a run.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use meshwork_protocol::pass::{ClosureId, PassId};

use super::pass_ring::ReplyWriter;

/// What a closure is given.
#[derive(Clone, Copy, Debug)]
pub struct PassCall<'a> {
    /// The arguments, where they lie in shared memory. In a child that the closure forks they are
    /// not mapped.
    pub args: &'a [u8],
    /// Which pass this is.
    pub pass: PassId,
    /// Which run of it, from zero: more than zero means that a worker died before.
    pub attempt: u8,
    /// What to fence writes with: greater at every run of the pass, and nobody else's.
    pub fencing_token: u64,
    /// The registry that the closure is of.
    pub registry: &'a PassRegistry,
}

/// Where a closure writes its result, piece by piece.
#[derive(Debug)]
pub struct PassReply<'w, 'r>(pub(super) &'w mut ReplyWriter<'r>);

impl PassReply<'_, '_> {
    /// Appends to the result. What is longer than a payload in the end is reported as such, and
    /// never cut.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }
}

/// A closure: reads the call, writes the result, or says why there is none.
pub type Closure =
    dyn Fn(&PassCall<'_>, &mut PassReply<'_, '_>) -> Result<(), String> + Send + Sync;

/// A registered closure.
#[derive(Clone)]
pub struct Registered {
    /// What it is called; empty for one that is known by its id alone.
    pub name: Arc<str>,
    /// What it does.
    pub run: Arc<Closure>,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({:?})", self.name)
    }
}

/// Why a closure was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Another closure has the id: of the same name, or of a name with the same hash.
    #[error("closure {id} ({name:?}) is taken by {by:?}: unregister that, or choose another name")]
    Taken {
        /// The id.
        id: ClosureId,
        /// The name that was to be registered.
        name: String,
        /// The name that has it.
        by: String,
    },
}

/// The registry. Clones are the same registry.
#[derive(Clone, Default)]
pub struct PassRegistry(Arc<Shared>);

#[derive(Default)]
struct Shared {
    closures: DashMap<ClosureId, Registered>,
    version: AtomicU64,
    watchers: Mutex<Vec<Watcher>>,
}

/// Told of changes for as long as it returns true.
type Watcher = Box<dyn Fn() -> bool + Send>;

impl fmt::Debug for PassRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PassRegistry({} closures)", self.0.closures.len())
    }
}

impl PassRegistry {
    /// A registry without closures.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a closure by name: it is given the arguments, and returns the result's bytes or an
    /// error.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Taken`]; the other closure stays.
    pub fn register<F, R, E>(&self, name: &str, closure: F) -> Result<ClosureId, RegisterError>
    where
        F: Fn(&PassCall<'_>) -> Result<R, E> + Send + Sync + 'static,
        R: AsRef<[u8]>,
        E: fmt::Display,
    {
        let id = ClosureId::of_name(name);
        self.insert(id, name, returning(closure))?;
        Ok(id)
    }

    /// Registers a closure by an id of the caller's choice.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register).
    pub fn register_id<F, R, E>(&self, id: ClosureId, closure: F) -> Result<(), RegisterError>
    where
        F: Fn(&PassCall<'_>) -> Result<R, E> + Send + Sync + 'static,
        R: AsRef<[u8]>,
        E: fmt::Display,
    {
        self.insert(id, "", returning(closure))
    }

    /// Registers a closure that writes its result where it is read, without a buffer between.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register).
    pub fn register_writing<F, E>(&self, name: &str, closure: F) -> Result<ClosureId, RegisterError>
    where
        F: Fn(&PassCall<'_>, &mut PassReply<'_, '_>) -> Result<(), E> + Send + Sync + 'static,
        E: fmt::Display,
    {
        let id = ClosureId::of_name(name);
        let run = move |call: &PassCall<'_>, reply: &mut PassReply<'_, '_>| {
            closure(call, reply).map_err(|error| error.to_string())
        };
        self.insert(id, name, Arc::new(run))?;
        Ok(id)
    }

    /// Registers a closure that is boxed already.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register).
    pub fn insert(
        &self,
        id: ClosureId,
        name: &str,
        run: Arc<Closure>,
    ) -> Result<(), RegisterError> {
        match self.0.closures.entry(id) {
            Entry::Occupied(taken) => {
                let (name, by) = (name.to_owned(), taken.get().name.to_string());
                return Err(RegisterError::Taken { id, name, by });
            }
            Entry::Vacant(free) => {
                free.insert(Registered { name: name.into(), run });
            }
        }
        self.changed();
        Ok(())
    }

    /// Forgets a closure: workers of this process take no more passes of it. Whether there was one.
    pub fn unregister(&self, id: ClosureId) -> bool {
        let was = self.0.closures.remove(&id).is_some();
        if was {
            self.changed();
        }
        was
    }

    fn changed(&self) {
        self.0.version.fetch_add(1, Ordering::Release);
        let mut watchers = self.0.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher());
    }

    /// The closure of an id.
    pub fn find(&self, id: ClosureId) -> Option<Registered> {
        self.0.closures.get(&id).map(|entry| entry.value().clone())
    }

    /// Every closure.
    pub fn all(&self) -> Vec<(ClosureId, Registered)> {
        self.0.closures.iter().map(|entry| (*entry.key(), entry.value().clone())).collect()
    }

    /// Grows with every change.
    #[inline(always)]
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Calls `watcher` at every change, for as long as it returns true.
    pub(super) fn watch(&self, watcher: impl Fn() -> bool + Send + 'static) {
        let mut watchers = self.0.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.push(Box::new(watcher));
    }
}

fn returning<F, R, E>(closure: F) -> Arc<Closure>
where
    F: Fn(&PassCall<'_>) -> Result<R, E> + Send + Sync + 'static,
    R: AsRef<[u8]>,
    E: fmt::Display,
{
    Arc::new(move |call, reply| {
        let result = closure(call).map_err(|error| error.to_string())?;
        reply.write(result.as_ref());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo(call: &PassCall<'_>) -> Result<Vec<u8>, String> {
        Ok(call.args.to_vec())
    }

    #[test]
    fn a_closure_is_found_by_its_name_and_by_its_id() {
        let registry = PassRegistry::new();
        let id = registry.register("echo", echo).unwrap();
        registry.register_id(ClosureId(0x1234), echo).unwrap();
        assert_eq!(id, ClosureId::of_name("echo"));
        assert_eq!(&*registry.find(id).unwrap().name, "echo");
        assert!(registry.find(ClosureId(0x1234)).is_some());
        assert!(registry.find(ClosureId(1)).is_none());
        assert_eq!(registry.version(), 2);
    }

    #[test]
    fn a_taken_id_is_an_error_that_names_both() {
        let registry = PassRegistry::new();
        registry.register("echo", echo).unwrap();
        let error = registry.register("echo", echo).unwrap_err().to_string();
        let text = "is taken by \"echo\": unregister that, or choose another name";
        assert!(error.ends_with(text), "{error}");
        assert!(registry.unregister(ClosureId::of_name("echo")));
        assert!(!registry.unregister(ClosureId::of_name("echo")));
        registry.register("echo", echo).unwrap();
    }
}
