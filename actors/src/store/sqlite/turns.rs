//! Turns at writing among the processes of one file.
//!
//! SQLite's write lock goes to whoever asks first once it is free. That is most often the one who has
//! just given it back, since the others are in a pause between two tries. Some commits in a row by one
//! process are good: each change of the writer costs it the pages that it knew. But one of five busy
//! processes was seen to wait for a third of all that the others wrote. So whoever has waited for long
//! raises a flag, and while it is up, whoever comes new waits before it tries.
//!
//! The flag is a lock (`flock`) on the log file, which SQLite itself never locks, and which is the same
//! file for all as long as any of them has the database open. The kernel frees it with a process. It
//! decides who goes first and nothing else: whoever waits for it too long goes on without.

use std::cell::Cell;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

use rusqlite::Connection;

use crate::store::limits::{BUSY_FAIR, BUSY_PAUSE, BUSY_PAUSE_MAX, OVERDUE, OVERDUE_PAUSE};

/// Lets `connection` wait up to `busy_wait` for other processes; the flag is still to come.
pub(super) fn wait_in_short_pauses(
    connection: &mut Connection,
    busy_wait: Duration,
) -> rusqlite::Result<()> {
    wait(connection, busy_wait, |_| false)
}

/// A process's part in the turns at one file.
pub(super) struct Turns {
    flag: Arc<Flag>,
    /// How long it lets others go first.
    patience: Duration,
    /// Whether somebody has had the flag up for longer than that, and has not been seen to lower it:
    /// it may have been stopped.
    is_ignored: Cell<bool>,
}

impl Turns {
    /// For a `connection` to the database at `path`, in WAL mode, that has had a transaction, and so
    /// has a log. From now on it raises the flag when it has waited long for its turn, and goes on
    /// waiting up to `busy_wait`.
    ///
    /// # Errors
    /// That of opening the log.
    pub(super) fn new(
        path: &Path,
        connection: &mut Connection,
        busy_wait: Duration,
    ) -> io::Result<Self> {
        // SQLite too resolves links before it names the log.
        let mut log = path.canonicalize()?.into_os_string();
        log.push("-wal");
        let flag = Arc::new(Flag::of(log.as_ref())?);
        let raised = flag.clone();
        wait(connection, busy_wait, move |waited| waited >= OVERDUE && raised.raise())
            .map_err(io::Error::other)?;
        Ok(Self { flag, patience: busy_wait / 10, is_ignored: Cell::new(false) })
    }

    /// Runs `begin`, which asks for SQLite's write lock, once nobody is overdue.
    pub(super) fn take<E>(&self, begin: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.let_the_overdue_go_first();
        let _asking = self.flag.ask();
        begin()
    }

    fn let_the_overdue_go_first(&self) {
        let since = Instant::now();
        while self.flag.is_up_elsewhere() {
            let waited = since.elapsed();
            if self.is_ignored.get() || waited >= self.patience {
                self.is_ignored.set(true);
                return;
            }
            thread::sleep(pause_after(waited));
        }
        self.is_ignored.set(false);
    }
}

/// The flag of a file, as one process has it.
struct Flag {
    log: File,
    /// Whether the process asks for its turn. SQLite waits for other things too, and whoever raised
    /// the flag then would not lower it.
    is_asking: AtomicBool,
    is_up: AtomicBool,
}

impl Flag {
    fn of(log: &Path) -> io::Result<Self> {
        Ok(Self { log: File::open(log)?, is_asking: false.into(), is_up: false.into() })
    }

    /// Whether another process has it up. Only for one that has not.
    fn is_up_elsewhere(&self) -> bool {
        // Shared, so that those who look do not see each other.
        let locked = self.log.try_lock_shared();
        if locked.is_ok() {
            let _ = self.log.unlock();
        }
        matches!(locked, Err(TryLockError::WouldBlock))
    }

    /// It may be raised from now on, until the answer is dropped.
    fn ask(&self) -> Asking<'_> {
        self.is_asking.store(true, Ordering::Relaxed);
        Asking(self)
    }

    /// Whether this process has it up now. One at a time can; others try again.
    fn raise(&self) -> bool {
        if !self.is_asking.load(Ordering::Relaxed) {
            return false;
        }
        if !self.is_up.load(Ordering::Relaxed) && self.log.try_lock().is_ok() {
            self.is_up.store(true, Ordering::Relaxed);
        }
        self.is_up.load(Ordering::Relaxed)
    }
}

/// Lowers the flag when dropped.
struct Asking<'a>(&'a Flag);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.is_asking.store(false, Ordering::Relaxed);
        if self.0.is_up.swap(false, Ordering::Relaxed) {
            let _ = self.0.log.unlock();
        }
    }
}

/// Lets `connection` wait in short pauses, the shortest while it `goes_first`.
fn wait(
    connection: &mut Connection,
    busy_wait: Duration,
    goes_first: impl Fn(Duration) -> bool + Send + 'static,
) -> rusqlite::Result<()> {
    let mut since = Instant::now();
    connection.busy_handler(Some(move |tries: i32| {
        if tries == 0 {
            since = Instant::now();
        }
        let waited = since.elapsed();
        let is_patient = waited < busy_wait;
        if is_patient {
            let pause = if goes_first(waited) { OVERDUE_PAUSE } else { pause_after(waited) };
            thread::sleep(pause);
        }
        is_patient
    }))
}

/// The pause of one that has waited this long already. It is the same for all for as long as a turn
/// takes among a few processes: whoever pauses longer gets fewer turns. As short for ever, the tries of
/// many processes would take all the time of a machine, that of the one with the lock included.
fn pause_after(waited: Duration) -> Duration {
    (waited.saturating_sub(BUSY_FAIR) / 8).clamp(BUSY_PAUSE, BUSY_PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sqlite::open::{SqliteOptions, open};

    fn options() -> SqliteOptions {
        SqliteOptions { busy_wait: Duration::from_secs(60), ..SqliteOptions::default() }
    }

    fn begin((connection, turns): &(Connection, Turns)) {
        turns.take(|| connection.execute_batch("BEGIN IMMEDIATE")).unwrap();
    }

    fn commit((connection, _): &(Connection, Turns)) {
        connection.execute_batch("COMMIT").unwrap();
    }

    #[test]
    fn whoever_is_overdue_goes_before_whoever_comes_new() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let writer = open(&path, &options()).unwrap();
        let overdue = open(&path, &options()).unwrap();
        let flag = overdue.1.flag.clone();
        begin(&writer);
        let waiting = thread::spawn(move || {
            begin(&overdue);
            overdue
        });
        while !flag.is_up.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        assert!(writer.1.flag.is_up_elsewhere());

        // It comes new as soon as it has committed, and there is no pause in which it could be slow.
        commit(&writer);
        let newcomer = thread::spawn(move || {
            begin(&writer);
            commit(&writer);
            writer
        });
        let overdue = waiting.join().unwrap();
        assert!(!flag.is_up.load(Ordering::Relaxed));
        assert!(!newcomer.is_finished(), "it has let the other one go first, and now waits for it");
        commit(&overdue);
        let writer = newcomer.join().unwrap();
        assert!(!writer.1.is_ignored.get());
    }

    #[test]
    fn a_flag_that_stays_up_is_waited_for_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let busy_wait = Duration::from_millis(10);
        let own = open(&path, &SqliteOptions { busy_wait, ..options() }).unwrap();
        let stopped = Flag::of(&folder.path().join("jobs.db-wal")).unwrap();
        let asking = stopped.ask();
        assert!(stopped.raise());
        for _ in 0..2 {
            begin(&own);
            commit(&own);
            assert!(own.1.is_ignored.get());
        }
        drop(asking);
        begin(&own);
        commit(&own);
        assert!(!own.1.is_ignored.get(), "the next one is waited for again");
    }

    #[test]
    fn the_flag_is_raised_for_a_turn_and_for_nothing_else() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [own, other] = [(); 2].map(|()| Flag::of(file.path()).unwrap());
        assert!(!own.raise());
        let asking = own.ask();
        assert!(own.raise() && own.raise() && other.is_up_elsewhere());
        drop(asking);
        assert!(!own.raise() && !other.is_up_elsewhere());
    }

    #[test]
    #[cfg(unix)]
    fn the_log_is_found_by_whatever_name_the_file_has() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(std::ffi::OsStr::from_bytes(b"not \xff utf-8.db"));
        let own = open(&path, &options()).unwrap();
        let link = folder.path().join("link.db");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let other = open(&link, &options()).unwrap();
        let _asking = own.1.flag.ask();
        assert!(own.1.flag.raise() && other.1.flag.is_up_elsewhere());
    }

    #[test]
    fn those_who_look_at_the_flag_do_not_see_each_other() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let flags = [(); 2].map(|()| Flag::of(file.path()).unwrap());
        flags[0].log.try_lock_shared().unwrap();
        assert!(!flags[1].is_up_elsewhere());
    }

    #[test]
    fn pauses_grow_only_after_several_turns() {
        let at = |ms| pause_after(Duration::from_millis(ms));
        assert_eq!([at(0), at(50), at(10_000)], [BUSY_PAUSE, BUSY_PAUSE, BUSY_PAUSE_MAX]);
    }
}
