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
//! decides who goes first and nothing else: whoever waits for it too long goes on without. While one is
//! stopped with its flag up, and where files cannot be locked so, turns are SQLite's alone.

use std::cell::Cell;
use std::fs::{File, TryLockError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::store::limits::{
    BUSY_FAIR, BUSY_PAUSE, BUSY_PAUSE_MAX, OVERDUE, OVERDUE_PAUSE, PATIENCE_PART,
};

/// Lets `connection` wait up to `busy_wait` for others; the flag is still to come.
pub(super) fn wait_in_short_pauses(
    connection: &mut Connection,
    busy_wait: Duration,
) -> rusqlite::Result<()> {
    wait(connection, busy_wait, |waited| Wait { waited, goes_first: false })
}

/// A connection's part in the turns at its file.
pub(super) struct Turns {
    flag: Arc<Flag>,
    /// How long it lets others go first.
    patience: Duration,
    /// Whether a flag was up for longer than that while SQLite's lock was free: whoever has it up is
    /// not asking, it was stopped. Until it is seen down.
    is_ignored: Cell<bool>,
}

impl Turns {
    /// For a `connection` to a database whose log is `log`. From now on it raises the flag when it has
    /// waited long for its turn, and goes on waiting up to `busy_wait`.
    pub(super) fn new(
        connection: &mut Connection,
        log: File,
        busy_wait: Duration,
    ) -> rusqlite::Result<Self> {
        let flag = Arc::new(Flag { log, asking: Mutex::default() });
        let asking = flag.clone();
        wait(connection, busy_wait, move |waited| asking.pauses(waited))?;
        Ok(Self { flag, patience: busy_wait / PATIENCE_PART, is_ignored: Cell::new(false) })
    }

    /// Runs `begin`, which asks for SQLite's write lock, once nobody is overdue.
    pub(super) fn take<E>(&self, begin: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let since = Instant::now();
        let is_passed_over = !self.others_went_first(since);
        self.flag.ask(since);
        let asking = Asking(&self.flag);
        let outcome = begin();
        if is_passed_over && outcome.is_ok() && !asking.has_paused() {
            self.is_ignored.set(true);
        }
        outcome
    }

    /// Lets the overdue go first. Whether it ended with no flag up.
    fn others_went_first(&self, since: Instant) -> bool {
        while self.flag.is_up_elsewhere() {
            let waited = since.elapsed();
            if self.is_ignored.get() || waited >= self.patience {
                return false;
            }
            thread::sleep(pause_after(waited));
        }
        self.is_ignored.set(false);
        true
    }
}

/// The flag of a file, as one connection has it.
struct Flag {
    log: File,
    /// While its turn is asked for: SQLite waits for other things too, and whoever raised the flag then
    /// would not lower it. One thread has all of this; the lock is for SQLite's handler, which must be
    /// `Send`.
    asking: Mutex<Option<Asked>>,
}

#[derive(Clone, Copy)]
struct Asked {
    since: Instant,
    /// Whether the lock was another's.
    has_paused: bool,
    is_up: bool,
}

impl Flag {
    fn asking(&self) -> MutexGuard<'_, Option<Asked>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another connection has it up. Only for one that has not.
    fn is_up_elsewhere(&self) -> bool {
        // Shared, so that those who look do not see each other.
        let locked = self.log.try_lock_shared();
        if locked.is_ok() {
            let _ = self.log.unlock();
        }
        matches!(locked, Err(TryLockError::WouldBlock))
    }

    /// It may be raised from now on, until it is lowered.
    fn ask(&self, since: Instant) {
        *self.asking() = Some(Asked { since, has_paused: false, is_up: false });
    }

    /// SQLite has waited so long. Raises the flag if that is due; one at a time can, others try again.
    fn pauses(&self, waited: Duration) -> Wait {
        let mut asking = self.asking();
        let Some(asked) = &mut *asking else { return Wait { waited, goes_first: false } };
        asked.has_paused = true;
        let waited = asked.since.elapsed();
        asked.is_up = asked.is_up || waited >= OVERDUE && self.log.try_lock().is_ok();
        Wait { waited, goes_first: asked.is_up }
    }

    fn lower(&self) {
        if self.asking().take().is_some_and(|asked| asked.is_up) {
            let _ = self.log.unlock();
        }
    }
}

/// Lowers the flag when dropped.
struct Asking<'a>(&'a Flag);

impl Asking<'_> {
    fn has_paused(&self) -> bool {
        self.0.asking().is_some_and(|asked| asked.has_paused)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.lower();
    }
}

/// A pause between two tries.
struct Wait {
    /// How long it has been in all.
    waited: Duration,
    /// Whether others wait before they try.
    goes_first: bool,
}

/// Lets `connection` wait in short pauses, of which it tells.
fn wait(
    connection: &mut Connection,
    busy_wait: Duration,
    tell: impl Fn(Duration) -> Wait + Send + 'static,
) -> rusqlite::Result<()> {
    let mut since = Instant::now();
    connection.busy_handler(Some(move |tries: i32| {
        if tries == 0 {
            since = Instant::now();
        }
        let Wait { waited, goes_first } = tell(since.elapsed());
        let is_patient = waited < busy_wait;
        if is_patient {
            thread::sleep(if goes_first { OVERDUE_PAUSE } else { pause_after(waited) });
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
    use std::path::Path;

    use super::*;
    use crate::store::sqlite::open::{SqliteOptions, open};

    type Store = (Connection, Turns);

    fn opened(path: &Path, busy_wait: Duration) -> Store {
        open(path, &SqliteOptions { busy_wait, ..SqliteOptions::default() }).unwrap()
    }

    fn begin((connection, turns): &Store) {
        turns.take(|| connection.execute_batch("BEGIN IMMEDIATE")).unwrap();
    }

    fn commit((connection, _): &Store) {
        connection.execute_batch("COMMIT").unwrap();
    }

    impl Flag {
        fn is_up(&self) -> bool {
            self.asking().is_some_and(|asked| asked.is_up)
        }

        /// As one that has asked since long ago raises it.
        fn raise(&self) -> Asking<'_> {
            self.ask(Instant::now() - OVERDUE);
            assert!(self.pauses(Duration::ZERO).goes_first);
            Asking(self)
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn whoever_is_overdue_raises_the_flag_until_its_turn_comes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let [writer, overdue] = [(); 2].map(|()| opened(&path, LONG));
        let flag = overdue.1.flag.clone();
        begin(&writer);
        let waiting = thread::spawn(move || {
            begin(&overdue);
            overdue
        });
        while !flag.is_up() {
            assert!(!waiting.is_finished());
            thread::yield_now();
        }
        assert!(writer.1.flag.is_up_elsewhere());
        commit(&writer);
        let overdue = waiting.join().unwrap();
        assert!(!flag.is_up() && !writer.1.flag.is_up_elsewhere());
        commit(&overdue);
    }

    #[test]
    fn whoever_comes_new_waits_while_a_flag_is_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let [newcomer, overdue] = [(); 2].map(|()| opened(&path, Duration::from_millis(500)));
        let up = overdue.1.flag.raise();
        let since = Instant::now();
        begin(&newcomer);
        assert!(since.elapsed() >= newcomer.1.patience);
        commit(&newcomer);
        drop(up);
        let [newcomer, overdue] = [(); 2].map(|()| opened(&path, LONG));
        let up = overdue.1.flag.raise();
        let waiting = thread::spawn(move || {
            begin(&newcomer);
            newcomer
        });
        drop(up);
        let newcomer = waiting.join().unwrap();
        assert!(!newcomer.1.is_ignored.get());
    }

    #[test]
    fn the_flag_of_one_that_does_not_take_its_turn_is_waited_for_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let [own, stopped] = [(); 2].map(|()| opened(&path, Duration::from_millis(10)));
        let up = stopped.1.flag.raise();
        for _ in 0..2 {
            begin(&own);
            commit(&own);
            assert!(own.1.is_ignored.get());
        }
        drop(up);
        begin(&own);
        commit(&own);
        assert!(!own.1.is_ignored.get(), "the next one is waited for again");
    }

    /// A crowd hands the flag on, so that it is always up; that is no reason to stop heeding it.
    #[test]
    fn a_flag_that_is_up_while_others_write_is_heeded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let own = opened(&path, Duration::from_secs(10));
        let own = (own.0, Turns { patience: Duration::ZERO, ..own.1 });
        let [writer, overdue] = [(); 2].map(|()| opened(&path, LONG));
        begin(&writer);
        let up = overdue.1.flag.raise();
        let flag = own.1.flag.clone();
        let waiting = thread::spawn(move || {
            begin(&own);
            own
        });
        while !flag.asking().is_some_and(|asked| asked.has_paused) {
            assert!(!waiting.is_finished());
            thread::yield_now();
        }
        commit(&writer);
        let own = waiting.join().unwrap();
        assert!(!own.1.is_ignored.get());
        drop(up);
    }

    #[test]
    fn the_flag_is_raised_for_a_turn_and_for_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let [own, other] = [(); 2].map(|()| opened(&path, LONG));
        let pauses = || own.1.flag.pauses(LONG).goes_first;
        assert!(!pauses());
        own.1.flag.ask(Instant::now() - OVERDUE);
        assert!(pauses() && pauses() && other.1.flag.is_up_elsewhere());
        own.1.flag.lower();
        assert!(!pauses() && !other.1.flag.is_up_elsewhere());
        let failed = own.1.take(|| {
            own.1.flag.asking().as_mut().unwrap().since -= OVERDUE;
            assert!(pauses());
            Err("no turn")
        });
        assert_eq!(failed, Err("no turn"));
        assert!(!other.1.flag.is_up_elsewhere());
    }

    /// What was waited for the flag counts.
    #[test]
    fn the_wait_for_a_turn_is_counted_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let own = opened(&folder.path().join("jobs.db"), LONG);
        own.1.flag.ask(Instant::now() - LONG);
        assert!(own.1.flag.pauses(Duration::ZERO).waited >= LONG);
        own.1.flag.lower();
        assert_eq!(own.1.flag.pauses(OVERDUE).waited, OVERDUE);
    }

    #[test]
    fn the_log_is_found_by_whatever_name_the_file_has() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(std::ffi::OsStr::from_bytes(b"not \xff utf-8.db"));
        let own = opened(&path, LONG);
        let link = folder.path().join("link.db");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let other = opened(&link, LONG);
        let _up = own.1.flag.raise();
        assert!(other.1.flag.is_up_elsewhere());
    }

    #[test]
    fn those_who_look_at_the_flag_do_not_see_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.db");
        let [own, other] = [(); 2].map(|()| opened(&path, LONG));
        own.1.flag.log.try_lock_shared().unwrap();
        assert!(!other.1.flag.is_up_elsewhere());
    }

    #[test]
    fn pauses_grow_only_after_several_turns() {
        let at = |ms| pause_after(Duration::from_millis(ms));
        assert_eq!([at(0), at(50), at(10_000)], [BUSY_PAUSE, BUSY_PAUSE, BUSY_PAUSE_MAX]);
    }
}
