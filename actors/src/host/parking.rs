//! Waiting: for a moment, or until woken, by threads of any process that maps the word.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use rustix::thread::futex;

/// Wakes whoever waits on a word.
pub fn wake(word: &AtomicU32) {
    word.fetch_add(1, Release);
    // Fails for no reason that could be mended here.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Waits until a word is not `value` any more, is woken, or the time is over.
pub fn wait(word: &AtomicU32, value: u32, at_most: Duration) {
    let timeout = rustix::time::Timespec {
        tv_sec: at_most.as_secs() as i64,
        tv_nsec: i64::from(at_most.subsec_nanos()),
    };
    // Woken, changed, interrupted, timed out: the caller looks again in any case.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&timeout));
}

/// So many pauses of the processor, of about 40 ns each.
#[inline(always)]
pub fn pause(pauses: u32) {
    for _ in 0..pauses {
        std::hint::spin_loop();
    }
}
