//! `std::sync::mpsc::sync_channel` with a thread that drains it: what submitting is compared with.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use anyhow::Result;

use super::common::echo::ARG_BYTES;
use super::common::scenario::Client;

/// Messages that fit, as many as in the peer's rings.
const CAPACITY: usize = 1_024;

/// How a message carries its arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    /// On the heap, as the peer's benchmark sends them: arguments of any length.
    Vec,
    /// In the message: of this length alone, and nothing to allocate.
    Array,
}

/// A message as a pass is, of the peer's shape.
enum Call {
    Vec { closure: u32, args: Vec<u8> },
    Array { closure: u32, args: [u8; ARG_BYTES] },
}

/// The sending end, and the thread that drains.
pub(super) struct Channel {
    payload: Payload,
    sender: Option<SyncSender<Call>>,
    /// What the channel had no room for.
    refused: Option<Call>,
    drained: Arc<Drained>,
    collected: u64,
    thread: Option<JoinHandle<()>>,
}

/// How many messages were drained, on a cache line of its own.
#[repr(align(128))]
#[derive(Default)]
struct Drained(AtomicU64);

impl Channel {
    /// A channel, and a thread that takes what it brings.
    pub(super) fn open(payload: Payload) -> Result<Self> {
        let (sender, receiver) = sync_channel(CAPACITY);
        let drained = Arc::new(Drained::default());
        let count = Arc::clone(&drained);
        let thread = std::thread::Builder::new().name("drain".to_owned()).spawn(move || {
            for (index, call) in (1..).zip(receiver) {
                match call {
                    Call::Vec { closure, args } => drop(black_box((closure, args))),
                    Call::Array { closure, args } => {
                        black_box((closure, args));
                    }
                }
                count.0.store(index, Release);
            }
        })?;
        Ok(Self {
            payload,
            sender: Some(sender),
            refused: None,
            drained,
            collected: 0,
            thread: Some(thread),
        })
    }
}

impl Client for Channel {
    #[inline]
    fn submit(&mut self) -> bool {
        let Some(sender) = &self.sender else { return false };
        let call = self.refused.take().unwrap_or_else(|| match self.payload {
            Payload::Vec => Call::Vec { closure: 1, args: vec![7; ARG_BYTES] },
            Payload::Array => Call::Array { closure: 1, args: [7; ARG_BYTES] },
        });
        match sender.try_send(call) {
            Ok(()) => true,
            Err(TrySendError::Full(call)) => {
                self.refused = Some(call);
                false
            }
            Err(TrySendError::Disconnected(_)) => panic!("the draining thread is gone"),
        }
    }

    /// Nothing comes back: what was drained counts.
    #[inline]
    fn collect(&mut self) -> u64 {
        let drained = self.drained.0.load(Acquire);
        let collected = drained - self.collected;
        self.collected = drained;
        collected
    }

    fn wrong(&self) -> u64 {
        0
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        drop(self.sender.take());
        if let Some(thread) = self.thread.take() {
            // It panics on nothing; a bench that ends does not care.
            let _ = thread.join();
        }
    }
}
