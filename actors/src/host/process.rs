//! Which process a row belongs to, and how to reach it when its lock says nothing yet.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::Relaxed;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::pass_ring::Holder;

/// A process: its number, and what tells it from another of that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessIdentity {
    /// Its number.
    pub pid: u32,
    /// When it started, in ticks since the boot; 0 where `/proc` does not say.
    pub start: u64,
    /// The namespace of the number; 0 where `/proc` does not say.
    pub namespace: u64,
}

impl ProcessIdentity {
    /// This process.
    pub fn this() -> Self {
        let pid = std::process::id();
        let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |ns| ns.ino());
        Self { pid, start: start_of(pid), namespace }
    }

    /// The process that a row names.
    pub fn of(holder: &Holder) -> Self {
        Self {
            pid: holder.pid.load(Relaxed),
            start: holder.pid_start.load(Relaxed),
            namespace: holder.pid_namespace.load(Relaxed),
        }
    }

    /// Writes it into a row.
    pub fn write(&self, holder: &Holder) {
        holder.pid.store(self.pid, Relaxed);
        holder.pid_start.store(self.start, Relaxed);
        holder.pid_namespace.store(self.namespace, Relaxed);
    }

    /// A descriptor that becomes readable when the process ends; `None` if it is gone, or its number
    /// means nothing here.
    pub fn open(&self, here: &Self) -> Option<OwnedFd> {
        if self.namespace == 0 || self.namespace != here.namespace || self.start == 0 {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let opened = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may be another's by now: whoever has it while the descriptor is open keeps it.
        (start_of(self.pid) == self.start).then_some(opened)
    }

    /// Whether it has certainly ended; false where its number means nothing here.
    pub fn is_gone(&self, here: &Self) -> bool {
        let is_known = self.namespace != 0 && self.namespace == here.namespace && self.start != 0;
        is_known && start_of(self.pid) != self.start
    }

    /// Kills the process. False if it is gone, is this one, or cannot be reached from here.
    pub fn kill(&self, here: &Self) -> bool {
        self.pid != here.pid
            && self.open(here).is_some_and(|fd| pidfd_send_signal(&fd, Signal::KILL).is_ok())
    }
}

/// When a process started; 0 if there is none, or `/proc` does not say.
fn start_of(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is the program's name in brackets, and may hold anything; the start is the
    // 22nd.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name.split_whitespace().nth(19).and_then(|start| start.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_itself_and_does_not_kill_itself() {
        let this = ProcessIdentity::this();
        assert!(this.start > 0 && this.namespace > 0);
        assert!(this.open(&this).is_some());
        assert!(!this.kill(&this));
    }

    #[test]
    fn a_later_process_of_the_same_number_is_another() {
        let this = ProcessIdentity::this();
        let earlier = ProcessIdentity { start: this.start - 1, ..this };
        assert!(earlier.open(&this).is_none());
        assert!(earlier.is_gone(&this) && !this.is_gone(&this));
    }

    #[test]
    fn a_number_of_another_namespace_means_nothing_here() {
        let this = ProcessIdentity::this();
        let elsewhere = ProcessIdentity { namespace: this.namespace + 1, ..this };
        assert!(elsewhere.open(&this).is_none());
        assert!(!elsewhere.is_gone(&this));
    }
}
