//! Opening a database file: what it must be, and what is said when it is not.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::schema::{APPLICATION_ID, MIGRATIONS};
use super::turns::{Turns, wait_in_short_pauses};
use crate::store::limits::{BUSY_PAUSE, BUSY_WAIT};
use crate::store::rules::{CrashRule, WallClock};

/// Statements kept prepared: more than there are.
const STATEMENTS_MAX: usize = 64;

/// How a database is used.
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    /// When a commit counts as done.
    pub durability: Durability,
    /// How long to wait for other processes that write, before a batch of requests fails.
    pub busy_wait: Duration,
    /// What a crash costs the jobs that were running.
    pub crash_rule: CrashRule,
    /// The wall clock.
    pub clock: WallClock,
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            busy_wait: BUSY_WAIT,
            crash_rule: CrashRule::default(),
            clock: WallClock::default(),
        }
    }
}

/// When a commit counts as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When it is on the disk (`synchronous=FULL`): what was answered survives a power failure.
    #[default]
    Full,
    /// When the operating system has it (`synchronous=NORMAL`): what was answered survives a crash
    /// of the process, and a power failure may undo the last commits. Fencing tokens may then repeat.
    Normal,
}

/// Why a file cannot be used as a store. Nothing was changed in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The folder that should hold it is not there.
    #[error("cannot open {}: there is no folder {}; create it first", path.display(), folder.display())]
    #[allow(missing_docs, reason = "named in the message")]
    NoFolder { path: PathBuf, folder: PathBuf },
    /// It is a folder.
    #[error("{} is a folder; name a file in it, such as {}", _0.display(), _0.join("jobs.db").display())]
    Folder(PathBuf),
    /// It, or the folder that holds it, may not be written.
    #[error(
        "no permission to write {}; SQLite must also be able to make files beside it (-wal, -shm)",
        _0.display()
    )]
    PermissionDenied(PathBuf),
    /// It is no SQLite database.
    #[error("{} is not a SQLite database; name another file, or move this one away", _0.display())]
    NotSqlite(PathBuf),
    /// It is a SQLite database with something else in it.
    #[error("{} is a SQLite database, but not one of meshwork; name another file", _0.display())]
    NotMeshwork(PathBuf),
    /// A newer meshwork wrote it.
    #[error(
        "{} has version {found} of the tables, and this meshwork knows up to {known}; \
         use the newer meshwork that wrote it",
        path.display()
    )]
    #[allow(missing_docs, reason = "named in the message")]
    Newer { path: PathBuf, found: u32, known: u32 },
    /// Another program kept it locked all the time.
    #[error("{} is locked by another program, and was for {waited:?}", path.display())]
    #[allow(missing_docs, reason = "named in the message")]
    Locked { path: PathBuf, waited: Duration },
    /// It cannot be opened for another reason.
    #[error("cannot open {}: {reason}", path.display())]
    #[allow(missing_docs, reason = "named in the message")]
    Failed { path: PathBuf, reason: String },
}

/// Opens, and if it is new makes, the database at `path`.
pub(super) fn open(path: &Path, options: &SqliteOptions) -> Result<(Connection, Turns), OpenError> {
    let started = Instant::now();
    loop {
        match try_open(path, options) {
            Err(Trouble::Sqlite(e)) if is_busy(&e) => {
                // Some steps, such as the change to WAL, ask for a lock without the busy handler.
                if started.elapsed() >= options.busy_wait {
                    return Err(OpenError::Locked {
                        path: path.to_owned(),
                        waited: options.busy_wait,
                    });
                }
                thread::sleep(BUSY_PAUSE);
            }
            Err(Trouble::Sqlite(e)) => return Err(explain(path, &e)),
            Err(Trouble::Known(e)) => return Err(e),
            Ok(opened) => return Ok(opened),
        }
    }
}

enum Trouble {
    Sqlite(rusqlite::Error),
    Known(OpenError),
}

impl From<rusqlite::Error> for Trouble {
    fn from(e: rusqlite::Error) -> Self {
        Self::Sqlite(e)
    }
}

fn try_open(path: &Path, options: &SqliteOptions) -> Result<(Connection, Turns), Trouble> {
    // No URIs: a path is a path, whatever characters it has. No mutex: one thread has it.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    wait_in_short_pauses(&mut connection, options.busy_wait)?;
    check(path, &connection)?;
    if connection.is_readonly("main")? {
        return Err(Trouble::Known(OpenError::PermissionDenied(path.to_owned())));
    }

    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        let reason = format!("its file system does not support a write-ahead log (it has {mode})");
        return Err(Trouble::Known(OpenError::Failed { path: path.to_owned(), reason }));
    }
    let synchronous = match options.durability {
        Durability::Full => "FULL",
        Durability::Normal => "NORMAL",
    };
    // 64 MB hold the working set of a million queued jobs. A checkpoint each 4,000 pages of the log
    // costs two more syncs in some hundred commits, and bounds the log's file.
    connection.execute_batch(&format!(
        "PRAGMA synchronous = {synchronous};
         PRAGMA cache_size = -65536;
         PRAGMA wal_autocheckpoint = 4000;
         PRAGMA temp_store = MEMORY;
         PRAGMA foreign_keys = OFF;
         PRAGMA trusted_schema = OFF;"
    ))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    // Without it a statement whose parameters stand beside a partial index is planned again each time
    // that it is bound, in case the new value allows another plan.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    migrate(path, &mut connection)?;
    let log = open_log(path).map_err(|e| {
        let reason = format!("its write-ahead log (-wal) cannot be opened: {e}");
        Trouble::Known(OpenError::Failed { path: path.to_owned(), reason })
    })?;
    let turns = Turns::new(&mut connection, log, options.busy_wait)?;
    Ok((connection, turns))
}

/// The log of a database in WAL mode that has had a transaction.
fn open_log(path: &Path) -> io::Result<File> {
    // SQLite too resolves links before it names the log.
    let mut log = path.canonicalize()?.into_os_string();
    log.push("-wal");
    File::open(log)
}

/// Checks that the file is a meshwork database that this version knows, or is empty. Returns its
/// version, 0 if it is empty.
fn check(path: &Path, connection: &Connection) -> Result<u32, Trouble> {
    // All of one snapshot: another process may be making the tables at this moment.
    connection.execute_batch("SAVEPOINT look")?;
    let version = check_snapshot(path, connection)?;
    connection.execute_batch("RELEASE look")?;
    Ok(version)
}

fn check_snapshot(path: &Path, connection: &Connection) -> Result<u32, Trouble> {
    let number = |pragma: &str| connection.query_row(pragma, [], |row| row.get::<_, i32>(0));
    let version = number("PRAGMA user_version")?;
    let application = number("PRAGMA application_id")?;
    let found = u32::try_from(version).unwrap_or(u32::MAX);
    if application == APPLICATION_ID {
        let known = MIGRATIONS.len() as u32;
        if found > known {
            return Err(Trouble::Known(OpenError::Newer { path: path.to_owned(), found, known }));
        }
        return Ok(found);
    }
    let things: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if things > 0 || application != 0 || version != 0 {
        return Err(Trouble::Known(OpenError::NotMeshwork(path.to_owned())));
    }
    Ok(0)
}

fn migrate(path: &Path, connection: &mut Connection) -> Result<(), Trouble> {
    if check(path, connection)? as usize == MIGRATIONS.len() {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Once more: another process may have been first.
    let version = check(path, &transaction)? as usize;
    for migration in &MIGRATIONS[version..] {
        transaction.execute_batch(migration)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", MIGRATIONS.len() as u32)?;
    transaction.commit()?;
    Ok(())
}

pub(super) fn is_busy(e: &rusqlite::Error) -> bool {
    matches!(
        e.sqlite_error_code(),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::FileLockingProtocolFailed
        )
    )
}

/// What SQLite's short answer means for this path.
fn explain(path: &Path, e: &rusqlite::Error) -> OpenError {
    let owned = path.to_owned();
    if path.is_dir() {
        return OpenError::Folder(owned);
    }
    match e.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => return OpenError::NotSqlite(owned),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            return OpenError::PermissionDenied(owned);
        }
        _ => {}
    }
    if e.sqlite_error_code() != Some(ErrorCode::CannotOpen) {
        return OpenError::Failed { path: owned, reason: e.to_string() };
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // SQLite does not say why it could not open a file. The system does, of one that is not there.
    // One that is there must not be opened past SQLite: closing it would drop the locks that other
    // connections of this process hold on it.
    let denied = if path.exists() {
        io::ErrorKind::PermissionDenied.into()
    } else if !folder.exists() {
        return OpenError::NoFolder { path: owned, folder: folder.to_owned() };
    } else {
        match File::create_new(path) {
            Err(e) => e,
            // It could be made after all. It stays: another process may have it open by now.
            Ok(_) => return OpenError::Failed { path: owned, reason: e.to_string() },
        }
    };
    match denied.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            OpenError::PermissionDenied(owned)
        }
        _ => OpenError::Failed { path: owned, reason: denied.to_string() },
    }
}
