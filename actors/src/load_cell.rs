//! This node's load, written by the actors that know and read when a ping is built: tenants never
//! send anything to the failure detector.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use meshwork_protocol::load::Load;

/// The parts of the load vector, each with one writer.
#[derive(Debug, Default)]
pub struct LoadCell {
    version: AtomicU64,
    stealable: AtomicU32,
    queued: AtomicU32,
    running: AtomicU32,
    slots: AtomicU32,
    service_us: AtomicU32,
}

impl LoadCell {
    /// Written by the deque's owner.
    pub fn set_deque(&self, queued: usize, stealable: usize) {
        self.queued.store(clamp(queued), Ordering::Relaxed);
        self.stealable.store(clamp(stealable), Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Written by the executor.
    pub fn set_executor(&self, running: usize, slots: usize, service_us: u64) {
        self.running.store(clamp(running), Ordering::Relaxed);
        self.slots.store(clamp(slots), Ordering::Relaxed);
        let service_us = u32::try_from(service_us).unwrap_or(u32::MAX);
        self.service_us.store(service_us, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The load now. Its parts may be of slightly different moments.
    pub fn load(&self) -> Load {
        let version = self.version.load(Ordering::Acquire);
        Load {
            version,
            stealable: self.stealable.load(Ordering::Relaxed),
            queued: self.queued.load(Ordering::Relaxed),
            running: self.running.load(Ordering::Relaxed),
            slots: self.slots.load(Ordering::Relaxed),
            service_us: self.service_us.load(Ordering::Relaxed),
        }
    }
}

fn clamp(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
