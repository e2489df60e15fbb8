//! Which actors share an arbiter.

use actix::prelude::*;

/// Where a node's actors run.
///
/// By default each node has arbiters (threads) of its own: `control` for deadlines, `work` for the
/// deque and what fills it, `tenant-0` for handlers, and one for an embedded store.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    control: Option<ArbiterHandle>,
    work: Option<ArbiterHandle>,
    tenant: Option<ArbiterHandle>,
    store: Option<ArbiterHandle>,
}

impl Placement {
    /// Everything on the arbiter where `start` is called: a busy handler then delays the failure
    /// detector, so this is for tests and tools.
    pub fn single() -> Self {
        Self::shared(Arbiter::try_current().as_ref())
    }

    /// Everything on one given arbiter, or each on its own where none is given.
    fn shared(arbiter: Option<&ArbiterHandle>) -> Self {
        let arbiter = arbiter.cloned();
        Self {
            control: arbiter.clone(),
            work: arbiter.clone(),
            tenant: arbiter.clone(),
            store: arbiter,
        }
    }

    /// The deadlines of this node on `arbiter`, which other nodes of the process may share.
    #[must_use]
    pub fn control(mut self, arbiter: ArbiterHandle) -> Self {
        self.control = Some(arbiter);
        self
    }

    /// The deque and what fills it on `arbiter`.
    #[must_use]
    pub fn work(mut self, arbiter: ArbiterHandle) -> Self {
        self.work = Some(arbiter);
        self
    }

    /// The handlers on `arbiter`.
    #[must_use]
    pub fn tenant(mut self, arbiter: ArbiterHandle) -> Self {
        self.tenant = Some(arbiter);
        self
    }

    /// The store on `arbiter`.
    #[must_use]
    pub fn store(mut self, arbiter: ArbiterHandle) -> Self {
        self.store = Some(arbiter);
        self
    }
}

/// A node's arbiters, and which of them it made itself.
pub(crate) struct Arbiters {
    pub(crate) control: ArbiterHandle,
    pub(crate) work: ArbiterHandle,
    pub(crate) tenant: ArbiterHandle,
    pub(crate) store: ArbiterHandle,
    own: Vec<Arbiter>,
}

impl Arbiters {
    /// Arbiters for passes alone, which have no handlers and no store.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_passes(placement: &Placement) -> std::io::Result<Self> {
        let mut placement = placement.clone();
        let mut own = Vec::new();
        for given in [&mut placement.control, &mut placement.work] {
            if given.is_none() {
                let arbiter = Arbiter::try_new()?;
                *given = Some(arbiter.handle());
                own.push(arbiter);
            }
        }
        placement.tenant.clone_from(&placement.work);
        placement.store.clone_from(&placement.work);
        let mut arbiters = Self::new(&placement)?;
        arbiters.own.extend(own);
        Ok(arbiters)
    }

    pub(crate) fn new(placement: &Placement) -> std::io::Result<Self> {
        let mut own = Vec::new();
        let mut place = |given: &Option<ArbiterHandle>| match given {
            Some(arbiter) => Ok(arbiter.clone()),
            None => {
                let arbiter = Arbiter::try_new()?;
                let handle = arbiter.handle();
                own.push(arbiter);
                Ok::<_, std::io::Error>(handle)
            }
        };
        let control = place(&placement.control)?;
        let work = place(&placement.work)?;
        let tenant = place(&placement.tenant)?;
        let store = place(&placement.store)?;
        Ok(Self { control, work, tenant, store, own })
    }

    /// Ends the arbiters that this node made.
    pub(crate) fn stop(self) {
        for arbiter in self.own {
            arbiter.stop();
        }
    }
}
