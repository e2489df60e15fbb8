//! The pass file and its lock file: made, checked, mapped, locked.
//!
//! **The file** is made beside its place and linked into it when it is whole, so nobody ever sees
//! half of one; it is checked before it is mapped, and never cut while anyone may have it mapped. Its
//! fixed part has memory behind it before it is mapped, and a buffer gets some before it is first
//! written ([`MappedFile::commit`]), so a full filesystem is an error and not a SIGBUS.
//!
//! **The lock file** is never mapped. Each participant holds an open-file-description lock on the
//! byte of its row, and the kernel releases it when the process ends, however it ends: that is the
//! proof of death. A lock belongs to the *open file*, which a forked child shares. So a child gives
//! its copy up in the handler that runs at `fork`, has no mapping, and is refused by every handle.
#![allow(unsafe_code, reason = "fcntl's locks on ranges, and what must happen at fork")]

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapOptions, MmapRaw};
use meshwork_protocol::pass::layout::{Geometry, Header, HeaderError, Layout, MAGIC};
use rustix::fs::FallocateFlags;

/// The pass file's name in its directory.
pub const FILE_NAME: &str = "passes.map";
/// The lock file's name.
pub const LOCK_NAME: &str = "passes.lock";
/// The name of a file that is not whole yet.
const NEW_NAME: &str = "passes.new";

/// The byte that is held while a file is made.
const MAKING: u64 = 1 << 40;

/// How long to wait while another process makes the file. It takes milliseconds; a process that is
/// stopped in the middle holds everyone up, and is named.
const MAKING_PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that get memory in one step: a call of the kernel each, and all of them for one buffer.
const COMMIT_BYTES: usize = 1 << 20;

/// Open lock files of one process; each handle that is opened has one.
const LOCK_FILES_MAX: usize = 256;

/// Why passes cannot be used in a directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others may write in the directory, or into its file, and so could hand this process calls and
    /// results.
    #[error("{} may be written by others (mode {mode:o}): chmod go-w it, or choose another", path.display())]
    Directory {
        /// The directory or the file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file is not one that this program reads.
    #[error("{}: {source}; stop every process that uses it, and remove it", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// The file was made for other numbers than were asked for.
    #[error("{} was made for {found:?}, not for {asked:?}", path.display())]
    Geometry {
        /// The file.
        path: PathBuf,
        /// What it is for.
        found: Geometry,
        /// What was asked for.
        asked: Geometry,
    },
    /// Numbers that no file can be made for.
    #[error(transparent)]
    Numbers(#[from] meshwork_protocol::pass::layout::GeometryError),
    /// The place of the directory is taken.
    #[error("{} is not a directory", path.display())]
    NotADirectory {
        /// What is there.
        path: PathBuf,
    },
    /// The directory, or the file, is another user's, who could cut the file while it is mapped.
    #[error("{} belongs to user {uid}, and this process to another: choose a directory of your own", path.display())]
    Owner {
        /// The directory or the file.
        path: PathBuf,
        /// Whose it is.
        uid: u32,
    },
    /// The lock file is not the one that the file was made with, so nobody can tell who is alive.
    #[error("{} was removed while processes had it open: stop every process of the directory, and remove {FILE_NAME} too", path.display())]
    LocksReplaced {
        /// The lock file.
        path: PathBuf,
    },
    /// The file is of another boot, and yet somebody uses it.
    #[error("{} is in use by a process of another boot: do machines share the directory? Choose one of this machine alone", path.display())]
    OtherBoot {
        /// The file.
        path: PathBuf,
    },
    /// Another process has been making the file for too long.
    #[error("another process has been making {} for {MAKING_PATIENCE:?}: is one stopped?", path.display())]
    Stuck {
        /// The file.
        path: PathBuf,
    },
    /// Too many are open in this process.
    #[error("{LOCK_FILES_MAX} pass directories are open in this process already")]
    TooMany,
    /// There are no passes to look at.
    #[error("no passes at {}: {missing}", path.display())]
    Nothing {
        /// Where they were looked for.
        path: PathBuf,
        /// What is not there, and what to do.
        missing: &'static str,
    },
}

impl OpenError {
    /// Whether trying again later may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Stuck { .. } | Self::TooMany)
    }
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { doing, path, source }
}

/// How many forks lie between the process's first and this one. Written by the handler that runs in
/// a child.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The open lock files of this process, as descriptors; -1 where there is none.
static LOCK_FILES: [AtomicI32; LOCK_FILES_MAX] = [const { AtomicI32::new(-1) }; LOCK_FILES_MAX];

/// A descriptor of nothing, to be put in the place of a lock file.
static NOTHING: AtomicI32 = AtomicI32::new(-1);

/// The process, as opposed to a child that was forked from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMark(u32);

impl ProcessMark {
    /// This process.
    pub fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is still the process it was: not in a forked child.
    #[inline(always)]
    pub fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}

/// Runs in a forked child, before `fork` returns there. Only atomics and `dup2`: what is allowed in
/// a child of a process with threads.
extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let nothing = NOTHING.load(Ordering::Relaxed);
    for slot in &LOCK_FILES {
        let lock_file = slot.swap(-1, Ordering::Relaxed);
        if lock_file >= 0 {
            // SAFETY: both are open descriptors of this child. The number stays taken, so whoever
            // closes it later closes nothing else.
            unsafe { libc::dup2(nothing, lock_file) };
        }
    }
}

fn watch_forks() -> Result<(), OpenError> {
    static ONCE: Once = Once::new();
    let null = Path::new("/dev/null");
    if NOTHING.load(Ordering::Relaxed) < 0 {
        let file = File::open(null).map_err(io_error("open", null))?.into_raw_fd();
        // Where another thread was first, there is one descriptor of nothing too many: no harm.
        let _ = NOTHING.compare_exchange(-1, file, Ordering::Relaxed, Ordering::Relaxed);
    }
    // SAFETY: `forked` does only what is allowed in a forked child, and lives as long as the program.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(forked));
    });
    Ok(())
}

/// The lock file: a byte for each row.
#[derive(Debug)]
pub struct LockFile {
    file: File,
    /// What this open file holds: the kernel would grant it again, which proves nothing.
    held: Mutex<BTreeSet<u64>>,
    mark: ProcessMark,
}

/// A byte of the lock file, held. Released when dropped, or when the process ends.
#[derive(Debug)]
pub struct ByteLock {
    file: Arc<LockFile>,
    byte: u64,
}

impl LockFile {
    /// Opens the lock file of a directory, and makes it if there is none.
    ///
    /// # Errors
    ///
    /// [`OpenError::Io`], [`OpenError::TooMany`].
    pub fn open(path: &Path) -> Result<Arc<Self>, OpenError> {
        watch_forks()?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(io_error("open", path))?;
        refuse_strangers(path, &file.metadata().map_err(io_error("look at", path))?)?;
        let descriptor = file.as_raw_fd();
        LOCK_FILES
            .iter()
            .find(|slot| {
                slot.compare_exchange(-1, descriptor, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            })
            .ok_or(OpenError::TooMany)?;
        Ok(Arc::new(Self { file, held: Mutex::default(), mark: ProcessMark::here() }))
    }

    /// Opens a lock file that is there, to look at and not to lock.
    ///
    /// # Errors
    ///
    /// [`OpenError::Io`].
    pub fn look(path: &Path) -> Result<Self, OpenError> {
        let file = File::open(path).map_err(io_error("open", path))?;
        Ok(Self { file, held: Mutex::default(), mark: ProcessMark::here() })
    }

    /// Whether anyone holds a byte, this file included. Takes nothing, so nobody is held up.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn is_held(&self, byte: u64) -> io::Result<bool> {
        if self.held.lock().unwrap_or_else(PoisonError::into_inner).contains(&byte) {
            return Ok(true);
        }
        let found = self.fcntl(libc::F_OFD_GETLK, byte, 1, libc::F_WRLCK)?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }

    /// Takes a byte, if nobody has it. `None` if this file has it already, or another does; in a
    /// forked child always.
    ///
    /// # Errors
    ///
    /// Whatever the kernel says but "held".
    pub fn try_lock(self: &Arc<Self>, byte: u64) -> io::Result<Option<ByteLock>> {
        if !self.mark.is_here() {
            return Ok(None);
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains(&byte) {
            return Ok(None);
        }
        match self.set(byte, libc::F_WRLCK) {
            Ok(()) => {
                held.insert(byte);
                Ok(Some(ByteLock { file: Arc::clone(self), byte }))
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => Ok(None),
                _ => Err(error),
            },
        }
    }

    fn set(&self, byte: u64, kind: i32) -> io::Result<()> {
        self.fcntl(libc::F_OFD_SETLK, byte, 1, kind).map(drop)
    }

    /// Whether anyone else holds any byte.
    fn is_any_held(&self) -> io::Result<bool> {
        // Zero stands for all bytes from the first on.
        let found = self.fcntl(libc::F_OFD_GETLK, 0, 0, libc::F_WRLCK)?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }

    /// Whether this is the lock file of the pass file with this number. What is written in it says so;
    /// a lock file that was removed and made anew would show the living as dead.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn is_of(&self, instance_id: [u8; 16]) -> io::Result<bool> {
        let mut found = [0; 16];
        match self.file.read_exact_at(&mut found, 0) {
            Ok(()) => Ok(found == instance_id),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// One of the calls on open-file-description locks: what the kernel made of it.
    fn fcntl(&self, command: i32, byte: u64, bytes: i64, kind: i32) -> io::Result<libc::flock> {
        // SAFETY: a `flock` is plain numbers, for which zero is a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as i16;
        lock.l_whence = libc::SEEK_SET as i16;
        lock.l_start = byte as i64;
        lock.l_len = bytes;
        // SAFETY: the descriptor is open, and the lock outlives the call.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), command, &raw mut lock) } {
            0 => Ok(lock),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl ByteLock {
    /// Whether it is this byte's.
    pub fn is_of(&self, byte: u64) -> bool {
        self.byte == byte
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        let descriptor = self.file.as_raw_fd();
        for slot in &LOCK_FILES {
            let _ = slot.compare_exchange(descriptor, -1, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Drop for ByteLock {
    fn drop(&mut self) {
        // In a forked child the open file may be the parent's still: its locks are not the child's.
        if self.file.mark.is_here() {
            let mut held = self.file.held.lock().unwrap_or_else(PoisonError::into_inner);
            held.remove(&self.byte);
            // Fails for no reason that could be mended here; the kernel releases it at the end.
            let _ = self.file.set(self.byte, libc::F_UNLCK);
        }
    }
}

/// A pass file, mapped.
#[derive(Debug)]
pub struct MappedFile {
    /// Not there in a forked child, which must not unmap what has come to lie in its place.
    map: ManuallyDrop<MmapRaw>,
    file: File,
    path: PathBuf,
    header: Header,
    layout: Layout,
    mark: ProcessMark,
}

impl MappedFile {
    /// Opens the pass file of a directory. Makes the directory, and the file, if there is none or it
    /// is of a boot of the machine that is over.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing is changed then, but that the directory may have been made.
    pub fn open(
        directory: &Path,
        asked: Option<Geometry>,
        locks: &Arc<LockFile>,
    ) -> Result<Self, OpenError> {
        let path = directory.join(FILE_NAME);
        let boot_id = boot_id()?;
        let found = match read_own(&path)? {
            Some(found) if found.1.boot_id == boot_id => found,
            _ => make(directory, asked.unwrap_or_default(), boot_id, locks)?,
        };
        let (file, header, layout) = found;
        let lock_path = directory.join(LOCK_NAME);
        if !locks.is_of(header.instance_id).map_err(io_error("read", &lock_path))? {
            return Err(OpenError::LocksReplaced { path: lock_path });
        }
        if let Some(asked) = asked
            && asked != header.geometry
        {
            return Err(OpenError::Geometry { path, found: header.geometry, asked });
        }
        let mapped = Self::map(path, file, header, layout)?;
        // Only spares the first touch of each page; a kernel without it touches them later.
        let _ = mapped.map.advise_range(Advice::PopulateWrite, 0, layout.fixed_bytes);
        Ok(mapped)
    }

    /// Opens a pass file that is there, to look at: makes nothing.
    ///
    /// # Errors
    ///
    /// [`OpenError`], [`OpenError::Nothing`] among them.
    pub fn look(directory: &Path) -> Result<Self, OpenError> {
        let nothing = |missing| OpenError::Nothing { path: directory.to_owned(), missing };
        let path = directory.join(FILE_NAME);
        let Some((file, header, layout)) = read(&path)? else {
            return Err(nothing(match fs::metadata(directory) {
                Ok(_) => "no process has opened the directory for passes yet",
                Err(_) => "there is no such directory; name the one that the processes open",
            }));
        };
        if header.boot_id != boot_id()? {
            return Err(nothing(
                "they ended with the last boot of this machine, and begin again when a process \
                 opens the directory",
            ));
        }
        Self::map(path, file, header, layout)
    }

    fn map(path: PathBuf, file: File, header: Header, layout: Layout) -> Result<Self, OpenError> {
        let map = MmapOptions::new()
            .len(layout.file_bytes)
            .map_raw(&file)
            .map_err(io_error("map", &path))?;
        // A child would otherwise hold what its dead parent's successor writes.
        map.advise(Advice::DontFork).map_err(io_error("advise on", &path))?;
        let map = ManuallyDrop::new(map);
        Ok(Self { map, file, path, header, layout, mark: ProcessMark::here() })
    }

    /// Its first byte, in this process's memory.
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it was removed from its directory: whoever opens that now is among others.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn is_removed(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.nlink() == 0)
    }

    /// The process that mapped it: in any other there is no mapping.
    pub fn mark(&self) -> ProcessMark {
        self.mark
    }

    /// Puts memory behind bytes of the file that may be a hole, and behind some after them, up to
    /// `end`. Where the committed part ends now.
    ///
    /// # Errors
    ///
    /// The filesystem is full, or refuses.
    pub fn commit(&self, offset: usize, bytes: usize, end: usize) -> io::Result<usize> {
        let to = (offset + bytes.max(COMMIT_BYTES)).min(end);
        let (at, length) = (offset as u64, (to - offset) as u64);
        allocate(&self.file, at, length)?;
        Ok(to)
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.mark.is_here() {
            // SAFETY: it is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

/// Puts memory behind a hole. There is no other way to do it that leaves alone what others write at
/// the same time, so a filesystem that cannot is refused.
fn allocate(file: &File, at: u64, length: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), at, length) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let why = "its filesystem has no fallocate: choose a directory on another, such as \
                           one in /dev/shm";
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// As [`read`], of a file that is this user's.
fn read_own(path: &Path) -> Result<Option<(File, Header, Layout)>, OpenError> {
    let found = read(path)?;
    if let Some((file, ..)) = &found {
        let metadata = file.metadata().map_err(io_error("look at", path))?;
        refuse_strangers(path, &metadata)?;
    }
    Ok(found)
}

/// The pass file, checked but not mapped; `None` if there is none.
fn read(path: &Path) -> Result<Option<(File, Header, Layout)>, OpenError> {
    let mut options = OpenOptions::new();
    let file = match options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("open", path)(error)),
    };
    let metadata = file.metadata().map_err(io_error("look at", path))?;
    refuse_others(path, &metadata)?;
    let size = if metadata.is_file() { metadata.len() } else { 0 };
    let mut bytes = [0; 128];
    let beginning = &mut bytes[..size.min(128) as usize];
    file.read_exact_at(beginning, 0).map_err(io_error("read", path))?;
    let (header, layout) = Header::from_bytes(beginning, size)
        .map_err(|source| OpenError::File { path: path.to_owned(), source })?;
    Ok(Some((file, header, layout)))
}

fn make(
    directory: &Path,
    geometry: Geometry,
    boot_id: [u8; 16],
    locks: &Arc<LockFile>,
) -> Result<(File, Header, Layout), OpenError> {
    let path = directory.join(FILE_NAME);
    let layout = Layout::new(geometry)?;
    let begun = Instant::now();
    let _making = loop {
        match locks.try_lock(MAKING).map_err(io_error("lock", &directory.join(LOCK_NAME)))? {
            Some(lock) => break lock,
            None if begun.elapsed() > MAKING_PATIENCE => return Err(OpenError::Stuck { path }),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    if let Some(found) = read_own(&path)? {
        if found.1.boot_id == boot_id {
            return Ok(found);
        }
        if locks.is_any_held().map_err(io_error("look at", &directory.join(LOCK_NAME)))? {
            return Err(OpenError::OtherBoot { path });
        }
        // Of a boot that is over: nobody has it mapped, and its passes are gone with their clients.
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
    }
    let new = directory.join(NEW_NAME);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(io_error("remove", &new)(error));
        }
        _ => {}
    }
    let made = write_new(&new, &layout, geometry, boot_id).and_then(|made| {
        let instance_id = made.1.instance_id;
        let named = locks.file.write_all_at(&instance_id, 0);
        named.map_err(io_error("write", &directory.join(LOCK_NAME)))?;
        fs::hard_link(&new, &path).map(|()| made).map_err(io_error("link", &path))
    });
    // Whether it failed or has its right name now.
    let _ = fs::remove_file(&new);
    made
}

fn write_new(
    new: &Path,
    layout: &Layout,
    geometry: Geometry,
    boot_id: [u8; 16],
) -> Result<(File, Header, Layout), OpenError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(new)
        .map_err(io_error("make", new))?;
    let mut instance_id = [0; 16];
    fastrand::fill(&mut instance_id);
    let header = Header { geometry, boot_id, instance_id };
    let written = || -> io::Result<()> {
        refuse_limit(layout.file_bytes as u64)?;
        file.set_len(layout.file_bytes as u64)?;
        allocate(&file, 0, layout.fixed_bytes as u64)?;
        file.write_all_at(&header.to_bytes(layout), 0)?;
        file.write_all_at(&MAGIC.to_ne_bytes(), 0)
    };
    written().map_err(io_error("write", new))?;
    Ok((file, header, *layout))
}

/// A file over this process's limit would end it by a signal.
fn refuse_limit(bytes: u64) -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit {
        Some(limit) if limit < bytes => Err(io::Error::other(format!(
            "the limit on the size of files (ulimit -f) is {limit} bytes, and {bytes} are needed"
        ))),
        _ => Ok(()),
    }
}

/// Makes the directory if there is none, for this user alone, and refuses one that others may write.
///
/// # Errors
///
/// [`OpenError::Io`], [`OpenError::Directory`].
pub fn prepare_directory(directory: &Path) -> Result<(), OpenError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => OpenError::NotADirectory { path: directory.to_owned() },
        _ => io_error("make the directory", directory)(error),
    })?;
    let metadata = fs::metadata(directory).map_err(io_error("look at", directory))?;
    refuse_others(directory, &metadata)?;
    refuse_strangers(directory, &metadata)
}

fn refuse_strangers(path: &Path, metadata: &fs::Metadata) -> Result<(), OpenError> {
    let uid = metadata.uid();
    if uid != rustix::process::geteuid().as_raw() {
        return Err(OpenError::Owner { path: path.to_owned(), uid });
    }
    Ok(())
}

fn refuse_others(path: &Path, metadata: &fs::Metadata) -> Result<(), OpenError> {
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 {
        return Err(OpenError::Directory { path: path.to_owned(), mode });
    }
    Ok(())
}

/// The boot of this machine.
fn boot_id() -> Result<[u8; 16], OpenError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).map_err(io_error("read", path))?;
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
        *byte = pair.iter().fold(0, |byte, digit| byte << 4 | digit);
    }
    Ok(id)
}

/// Buffers in a file of their own, which processes hand each other by a flag: what passes are measured
/// against (`benches/passes`). Nothing recovers a process that dies between two flags.
#[doc(hidden)]
#[derive(Debug)]
pub struct RawBuffers {
    map: MmapRaw,
    count: usize,
    bytes: usize,
}

/// Bytes of a flag: lines of its own. The flags come first, then the buffers.
const FLAG_BYTES: usize = 128;
const EMPTY: u64 = 0;
const PUTTING: u64 = 1;
const FULL: u64 = 2;
const TAKING: u64 = 3;

impl RawBuffers {
    /// Maps a file with so many buffers, and makes it if it is not there.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn open(path: &Path, count: usize, bytes: usize) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let length = (FLAG_BYTES + bytes).checked_mul(count).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < length as u64 {
            file.set_len(length as u64)?;
        }
        Ok(Self { map: MmapOptions::new().len(length).map_raw(&file)?, count, bytes })
    }

    /// Copies into a buffer, once it is empty.
    pub fn put(&self, buffer: usize, from: &[u8]) {
        assert_eq!(from.len(), self.bytes);
        self.pass_on(buffer, [EMPTY, PUTTING, FULL], |place| {
            // SAFETY: see `pass_on`; the lengths are the same.
            unsafe { place.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        });
    }

    /// Copies out of a buffer, once it is full.
    pub fn take(&self, buffer: usize, into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes);
        self.pass_on(buffer, [FULL, TAKING, EMPTY], |place| {
            // SAFETY: see `pass_on`; the lengths are the same.
            unsafe { place.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        });
    }

    /// Waits until a buffer is empty.
    pub fn wait_until_empty(&self, buffer: usize) {
        while self.flag(buffer).load(Ordering::Acquire) != EMPTY {
            std::hint::spin_loop();
        }
    }

    /// Gives the buffer's place to `copy`, which has it for itself: nobody else gets past the flag
    /// while that is in the middle state. Pair `buffer`: what the last one did there is seen.
    fn pass_on(
        &self,
        buffer: usize,
        [from, while_copying, to]: [u64; 3],
        copy: impl FnOnce(*mut u8),
    ) {
        let flag = self.flag(buffer);
        while flag
            .compare_exchange_weak(from, while_copying, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            std::hint::spin_loop();
        }
        // SAFETY: the buffer lies in the mapping, after the flags.
        copy(unsafe { self.map.as_mut_ptr().add(self.count * FLAG_BYTES + buffer * self.bytes) });
        // Pair `buffer`.
        flag.store(to, Ordering::Release);
    }

    fn flag(&self, buffer: usize) -> &AtomicU64 {
        assert!(buffer < self.count);
        // SAFETY: in the mapping, aligned to its lines, and only ever used as an atomic.
        unsafe { &*self.map.as_mut_ptr().add(buffer * FLAG_BYTES).cast::<AtomicU64>() }
    }
}
