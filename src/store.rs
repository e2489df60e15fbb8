//! Which database is the source of truth.

#[cfg(feature = "sqlite")]
use std::path::PathBuf;

use meshwork_actors::store::messages::StoreHandle;
#[cfg(feature = "sqlite")]
use meshwork_actors::store::sqlite::SqliteOptions;

/// Where a node keeps jobs and leases.
#[derive(Clone)]
pub struct Store(pub(crate) Kind);

#[derive(Clone)]
pub(crate) enum Kind {
    Memory,
    #[cfg(feature = "sqlite")]
    Sqlite {
        path: PathBuf,
        options: Box<SqliteOptions>,
    },
    Shared(Box<StoreHandle>),
}

impl Store {
    /// In this node's memory: for tests, and for jobs that may be lost with the process.
    pub fn memory() -> Self {
        Self(Kind::Memory)
    }

    /// In a SQLite file, which the nodes of one machine may share. It is made if it is not there.
    #[cfg(feature = "sqlite")]
    pub fn sqlite(path: impl Into<PathBuf>) -> Self {
        Self::sqlite_with(path, SqliteOptions::default())
    }

    /// In a SQLite file, with other settings than the default.
    #[cfg(feature = "sqlite")]
    pub fn sqlite_with(path: impl Into<PathBuf>, options: SqliteOptions) -> Self {
        Self(Kind::Sqlite { path: path.into(), options: Box::new(options) })
    }

    /// A store that was started elsewhere, which the nodes of one process may share. Whoever started
    /// it closes it.
    pub fn shared(handle: StoreHandle) -> Self {
        Self(Kind::Shared(Box::new(handle)))
    }
}
