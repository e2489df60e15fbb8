//! One atomic word of shared memory, whoever provides it.

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic `u64`. Implemented by the standard one, over mapped memory or the heap, and by a model
/// checker's, so that what is checked is the code that runs.
pub trait AtomicWord {
    /// Reads.
    fn load(&self, order: Ordering) -> u64;
    /// Writes.
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `current` by `new`: the former value, as an error where it was another.
    ///
    /// # Errors
    ///
    /// The value that was found instead.
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    /// Replaces.
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// Sets bits.
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    /// Keeps bits.
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
    /// Orders a `SeqCst` read-modify-write before the `SeqCst` load that follows. The language's
    /// total order of such accesses does that already, at no cost, so this is empty; a model checker
    /// that does not know the order puts a fence here.
    fn order_after_write();
}

impl AtomicWord for AtomicU64 {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline(always)]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline(always)]
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.compare_exchange(current, new, success, failure)
    }

    #[inline(always)]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }

    #[inline(always)]
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_or(bits, order)
    }

    #[inline(always)]
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_and(bits, order)
    }

    #[inline(always)]
    fn order_after_write() {}
}
