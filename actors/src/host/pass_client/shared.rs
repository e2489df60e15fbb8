//! What the handles of a client share: its range, and whom the end of each slot's pass is told.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use dashmap::DashMap;
use meshwork_protocol::limits::{PASS_ATTEMPTS_MAX, PASS_LOOK_EVERY};
use meshwork_protocol::pass::frame::{Call, INLINE_BYTES};
use meshwork_protocol::pass::patience::{Hope, LastPoll, Poll};
use meshwork_protocol::pass::unserved::Unserved;
use meshwork_protocol::pass::{ClosureId, PassId, WorkerIndex};
use meshwork_protocol::time::Instant;
use tokio::sync::{Notify, oneshot};

use super::{ClientOptions, Sink};
use crate::clock::Clock;
use crate::host::parking::{pause, wake};
use crate::host::pass::{Completion, Pass, PassOutcome, SubmitError};
use crate::host::pass_host::PassHost;
use crate::host::pass_ring::{FreeSlot, NewCall, PassRing, SlotRange, WrittenSlot};

/// Polls with a reply between two looks at the clock: one that found nothing has the time.
const POLLS: u32 = 64;

/// Ends that the sink is told at a time, most often at most.
const SINK_BATCH: usize = 64;

pub(super) struct Shared {
    pub(super) host: Arc<PassHost>,
    pub(super) range: SlotRange,
    pub(super) options: ClientOptions,
    /// Most bytes of arguments.
    limit: usize,
    /// The rows of closures that were looked up.
    rows: DashMap<ClosureId, u16>,
    /// For each slot, a [`Told`]. Written by who submits, before the slot is ready; read by who
    /// collects, after it is done.
    told: Box<[AtomicU8]>,
    callers: Box<[Mutex<Option<oneshot::Sender<Completion<'static>>>>]>,
    pub(super) sink: OnceLock<Sink>,
    /// Whether the collector thread was started.
    pub(super) has_collector: AtomicBool,
    /// Ends of passes that were submitted for `poll` and taken back. Their slots are held until they
    /// are told, so there are never more than slots.
    returned: Mutex<VecDeque<Completion<'static>>>,
    has_returned: AtomicBool,
    /// Polls that found something, since the clock was looked at.
    polls: AtomicU32,
    /// A [`LastPoll`]. Of two who poll at once, one counts.
    last_poll: AtomicU64,
    joined: Instant,
    /// When the slots themselves are looked at next, in microseconds.
    next_sweep: AtomicU64,
    unserved: Mutex<Unserved>,
    /// Whether someone has taken the collector thread's place.
    pub(super) attended: AtomicBool,
    /// Futures that await a pass, which only the collector thread serves at once.
    pub(super) calls: AtomicUsize,
    pub(super) hope: Mutex<Hope>,
    room_wanted: AtomicUsize,
    room: Notify,
    pub(super) news: Notify,
}

/// Whom the end of a slot's pass is told.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Told {
    /// Whoever polls next.
    Poll = 0,
    /// The sink.
    Sink = 1,
    /// The future that called.
    Caller = 2,
    /// Whoever polls next; if nobody does for a while, nobody: the client's predecessor submitted it.
    Adopted = 3,
}

impl Told {
    fn from_byte(byte: u8) -> Self {
        match byte {
            1 => Self::Sink,
            2 => Self::Caller,
            3 => Self::Adopted,
            _ => Self::Poll,
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "client {} ({:?})", self.range.client().0, self.options.name)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(host: &Arc<PassHost>, range: SlotRange, options: ClientOptions) -> Self {
        let geometry = host.ring().layout().geometry;
        let slots = geometry.slots_per_client as usize;
        Self {
            host: Arc::clone(host),
            range,
            limit: (geometry.payload_bytes as usize).max(INLINE_BYTES),
            rows: DashMap::new(),
            told: (0..slots).map(|_| AtomicU8::new(Told::Adopted as u8)).collect(),
            callers: (0..slots).map(|_| Mutex::new(None)).collect(),
            sink: OnceLock::new(),
            has_collector: AtomicBool::new(false),
            returned: Mutex::default(),
            has_returned: AtomicBool::new(false),
            polls: AtomicU32::new(0),
            last_poll: AtomicU64::new(0),
            joined: Clock.coarse(),
            next_sweep: AtomicU64::new(0),
            unserved: Mutex::new(Unserved::new(options.no_worker_after)),
            attended: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            hope: Mutex::default(),
            room_wanted: AtomicUsize::new(0),
            room: Notify::new(),
            news: Notify::new(),
            options,
        }
    }

    #[inline(always)]
    fn slots(&self) -> u32 {
        self.told.len() as u32
    }

    #[inline(always)]
    fn place(&self, slot: u32) -> usize {
        (slot % self.slots()) as usize
    }

    #[inline(always)]
    fn told(&self, slot: u32) -> Told {
        Told::from_byte(self.told[self.place(slot)].load(Relaxed))
    }

    /// Passes that were submitted and whose ends were not told yet.
    pub(super) fn under_way(&self) -> u32 {
        self.slots() - self.range.room()
    }

    #[inline(always)]
    fn check(&self, pass: &Pass<'_>) -> Result<(), SubmitError> {
        if pass.args.len() > self.limit {
            return Err(SubmitError::TooLong { bytes: pass.args.len(), limit: self.limit });
        }
        if !self.host.ring().is_here() {
            return Err(SubmitError::Forked);
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn reserve(&self, pass: &Pass<'_>) -> Result<FreeSlot<'_>, SubmitError> {
        self.check(pass)?;
        self.range.reserve().ok_or(SubmitError::Busy(self.slots()))
    }

    pub(super) async fn reserve_when_room(
        &self,
        pass: &Pass<'_>,
    ) -> Result<FreeSlot<'_>, SubmitError> {
        loop {
            match self.reserve(pass) {
                Err(SubmitError::Busy(_)) => {
                    let _ = tokio::time::timeout(PASS_LOOK_EVERY, self.room_made()).await;
                }
                other => return other,
            }
        }
    }

    pub(super) async fn room_made(&self) {
        let _wanted = Counted::new(&self.room_wanted);
        let made = self.room.notified();
        tokio::pin!(made);
        made.as_mut().enable();
        if self.range.room() == 0 {
            made.await;
        }
    }

    #[inline(always)]
    pub(super) fn write<'s>(
        &self,
        slot: FreeSlot<'s>,
        pass: &Pass<'_>,
    ) -> Result<WrittenSlot<'s>, SubmitError> {
        slot.write(&new_call(pass)).map_err(SubmitError::NoSpace)
    }

    /// Writes passes into as many slots: all, or none.
    pub(super) fn write_all(
        &self,
        passes: &[Pass<'_>],
    ) -> Result<Vec<WrittenSlot<'_>>, SubmitError> {
        if !self.host.ring().is_here() {
            return Err(SubmitError::Forked);
        }
        passes.iter().try_for_each(|pass| self.check(pass))?;
        if passes.len() > self.slots() as usize {
            return Err(SubmitError::TooMany { passes: passes.len(), slots: self.slots() });
        }
        let slots = self.range.reserve_all(passes.len()).ok_or(SubmitError::Busy(self.slots()))?;
        FreeSlot::write_all(slots, passes.iter().map(new_call)).map_err(SubmitError::NoSpace)
    }

    /// Whom the end of a prepared pass is told.
    pub(super) fn routed(&self) -> Told {
        if self.sink.get().is_some() { Told::Sink } else { Told::Poll }
    }

    /// A future awaits this pass, until what is returned is dropped.
    pub(super) fn expect_call(
        &self,
        pass: PassId,
        caller: oneshot::Sender<Completion<'static>>,
    ) -> Counted<'_> {
        let counted = Counted::new(&self.calls);
        *lock(&self.callers[self.place(pass.slot)]) = Some(caller);
        if self.attended.load(SeqCst) {
            // Whoever attends may be busy with something else when the reply comes.
            let sleeping = self.host.ring().client(self.range.client()).sleeping();
            self.host.ring().board().client_falls_asleep(sleeping);
        }
        counted
    }

    #[inline(always)]
    pub(super) fn publish(&self, slot: WrittenSlot<'_>, told: Told) -> PassId {
        let closure = slot.call().closure;
        self.told[self.place(slot.pass().slot)].store(told as u8, Relaxed);
        let pass = slot.publish();
        self.host.ring().wake_worker(|worker| self.can_run(worker, closure));
        pass
    }

    #[cold]
    fn can_run(&self, worker: WorkerIndex, closure: ClosureId) -> bool {
        let row = self.row_of(closure);
        row.is_some_and(|row| runs(self.host.ring(), worker, row))
    }

    fn row_of(&self, closure: ClosureId) -> Option<u16> {
        if let Some(row) = self.rows.get(&closure) {
            return Some(*row);
        }
        let row = self.host.ring().find_closure(closure)?;
        self.rows.insert(closure, row);
        Some(row)
    }

    #[inline]
    pub(super) fn poll(&self, each: impl FnMut(Completion<'_>)) -> usize {
        let mut last = LastPoll::from_bits(self.last_poll.load(Relaxed));
        let poll = last.poll(self.under_way(), || Clock.now());
        let polled = match poll {
            Poll::Skip => 0,
            Poll::Now => self.look(each),
            Poll::After(pauses) => {
                pause(pauses);
                self.look(each)
            }
        };
        last.collected(polled as u32);
        self.last_poll.store(last.to_bits(), Relaxed);
        polled
    }

    #[inline(always)]
    fn look(&self, mut each: impl FnMut(Completion<'_>)) -> usize {
        if !self.range.has_news() && !self.range.has_left() && !self.has_returned.load(Acquire) {
            self.sweep_if_due();
            return 0;
        }
        let polls = self.polls.load(Relaxed).wrapping_add(1);
        self.polls.store(polls, Relaxed);
        if polls.is_multiple_of(POLLS) {
            self.sweep_if_due();
        }
        self.collect(true, |completion| {
            each(completion);
            true
        }) + self.take_returned(each)
    }

    /// The end of one pass that was submitted for whoever polls.
    pub(super) fn take_one(&self) -> Option<Completion<'static>> {
        if let Some(returned) = self.pop_returned() {
            return Some(returned);
        }
        let mut one = None;
        self.collect(true, |completion| {
            let is_first = one.is_none();
            if is_first {
                one = Some(completion.into_owned());
            }
            is_first
        });
        one
    }

    /// Tells ends: to the sink, to the futures that called, and the others to `each`, which says
    /// whether it takes one. How many it took.
    #[inline]
    fn collect(&self, left: bool, mut each: impl FnMut(Completion<'_>) -> bool) -> usize {
        let Some(mut drain) = self.range.drain() else {
            // Whoever has it may be long, and tells of what it finds.
            std::thread::yield_now();
            return 0;
        };
        let mut for_sink = ForSink { sink: self.sink.get(), ends: Vec::new() };
        let mut taken = 0;
        let collected = drain.collect(left, |arrived| {
            let slot = arrived.pass.slot;
            match self.told(slot) {
                Told::Poll | Told::Adopted => {
                    let takes = each(arrived.into());
                    taken += usize::from(takes);
                    return takes;
                }
                Told::Sink => {
                    if for_sink.ends.capacity() == 0 {
                        for_sink.ends.reserve(SINK_BATCH);
                    }
                    for_sink.ends.push(Completion::from(arrived).into_owned());
                }
                Told::Caller => {
                    if let Some(caller) = self.take_caller(slot) {
                        // Whoever called may have given up.
                        let _ = caller.send(Completion::from(arrived).into_owned());
                    }
                }
            }
            true
        });
        drop(drain);
        drop(for_sink);
        if collected > 0 {
            self.tell_of_room();
        }
        taken
    }

    fn take_caller(&self, slot: u32) -> Option<oneshot::Sender<Completion<'static>>> {
        lock(&self.callers[self.place(slot)]).take()
    }

    #[inline]
    fn tell_of_room(&self) {
        if self.room_wanted.load(SeqCst) > 0 {
            self.room.notify_waiters();
        }
    }

    pub(super) fn take_back(&self, pass: PassId, outcome: PassOutcome<'static>) -> bool {
        if !self.host.ring().is_here() {
            return false;
        }
        let Some((tag, slot)) = self.range.take_back(pass) else { return false };
        // Asked before the slot can be another pass's.
        let (told, caller) = (self.told(pass.slot), self.take_caller(pass.slot));
        let end = Completion { pass, tag, attempt: 0, outcome };
        if let Told::Poll | Told::Adopted = told {
            self.range.hold(slot);
        } else {
            drop(slot);
        }
        match (told, caller, self.sink.get()) {
            // Whoever called may have given up.
            (Told::Caller, caller, _) => drop(caller.map(|caller| caller.send(end))),
            (Told::Sink, _, Some(sink)) => sink(vec![end]),
            _ => {
                lock(&self.returned).push_back(end);
                self.has_returned.store(true, SeqCst);
                self.news.notify_one();
            }
        }
        self.tell_of_room();
        true
    }

    /// Tells ends to their futures and to the sink; those for whoever polls stay.
    pub(super) fn collect_routed(&self) {
        let mut left = 0;
        self.collect(false, |_| {
            left += 1;
            false
        });
        if left > 0 {
            self.news.notify_one();
        }
    }

    fn pop_returned(&self) -> Option<Completion<'static>> {
        if !self.has_returned.load(Acquire) {
            return None;
        }
        let mut returned = lock(&self.returned);
        let end = returned.pop_front();
        self.has_returned.store(!returned.is_empty(), SeqCst);
        drop(returned);
        if let Some(end) = &end {
            self.range.release(end.pass.slot);
            self.tell_of_room();
        }
        end
    }

    fn take_returned(&self, mut each: impl FnMut(Completion<'_>)) -> usize {
        std::iter::from_fn(|| self.pop_returned()).map(&mut each).count()
    }

    /// Looks at the slots themselves, every now and then.
    #[inline(always)]
    pub(super) fn sweep_if_due(&self) {
        if Clock.coarse() >= Instant::from_micros(self.next_sweep.load(Relaxed)) {
            self.sweep();
        }
    }

    #[cold]
    fn sweep(&self) {
        let Ok(mut unserved) = self.unserved.try_lock() else { return };
        let now = Clock.coarse();
        self.next_sweep.store((now + PASS_LOOK_EVERY).as_micros(), Relaxed);
        self.range.find_unannounced();
        let waiting = self.range.waiting().map(|(pass, closure, _)| (pass, closure));
        let is_served = |closure| self.is_served(closure);
        let overdue = unserved.look(now, waiting, is_served);
        drop(unserved);
        if now.saturating_since(self.joined) >= self.options.adopted_for {
            self.drop_adopted();
        }
        for pass in overdue {
            self.take_back(pass, PassOutcome::NoWorker);
        }
    }

    /// Nobody has come for what the predecessor left.
    fn drop_adopted(&self) {
        let Some(mut drain) = self.range.drain() else { return };
        let dropped = drain.collect(true, |arrived| self.told(arrived.pass.slot) == Told::Adopted);
        drop(drain);
        if dropped > 0 {
            self.host.ring().header().orphaned.fetch_add(dropped as u64, AcqRel);
            self.tell_of_room();
        }
    }

    /// Whether a worker that is there has the closure.
    fn is_served(&self, closure: ClosureId) -> bool {
        let ring = self.host.ring();
        self.row_of(closure).is_some_and(|row| {
            let workers = ring.layout().geometry.workers as u16;
            (0..workers).any(|worker| runs(ring, WorkerIndex(worker), row))
        })
    }
}

#[inline]
fn new_call<'a>(pass: &'a Pass<'_>) -> NewCall<'a> {
    let call = Call {
        closure: pass.closure,
        bytes: pass.args.len() as u32,
        attempts: pass.attempts.clamp(1, PASS_ATTEMPTS_MAX),
        priority: pass.priority,
        timed: pass.deadline.is_some(),
    };
    let deadline_us = pass.deadline.map_or(0, meshwork_protocol::time::micros);
    NewCall { call, arguments: &pass.args, tag: pass.tag, deadline_us }
}

/// Ends that were taken out of their slots: the sink is told of them, also where one who polls panics.
struct ForSink<'s> {
    sink: Option<&'s Sink>,
    ends: Vec<Completion<'static>>,
}

impl Drop for ForSink<'_> {
    fn drop(&mut self) {
        if !self.ends.is_empty()
            && let Some(sink) = self.sink
        {
            sink(std::mem::take(&mut self.ends));
        }
    }
}

fn runs(ring: &PassRing, worker: WorkerIndex, closure_row: u16) -> bool {
    let words = &ring.worker(worker).runs;
    words[usize::from(closure_row) / 64].load(Relaxed) & 1 << (closure_row % 64) != 0
}

impl Drop for Shared {
    fn drop(&mut self) {
        let ring = self.host.ring();
        if !ring.is_here() {
            return;
        }
        let client = self.range.client();
        // What is left runs on, and stays for the next client of the name.
        if self.range.is_all_free() {
            self.host.clear_client(client);
        } else {
            self.host.mark_left(client);
        }
        wake(ring.client(client).wake_word());
    }
}

/// Takes a pass back when whoever called it does not wait any longer.
pub(super) struct TakeBack<'c> {
    shared: &'c Shared,
    pass: Option<PassId>,
}

impl<'c> TakeBack<'c> {
    pub(super) fn new(shared: &'c Shared, pass: PassId) -> Self {
        Self { shared, pass: Some(pass) }
    }

    pub(super) fn ended(mut self) {
        self.pass = None;
    }
}

impl Drop for TakeBack<'_> {
    fn drop(&mut self) {
        if let Some(pass) = self.pass {
            self.shared.take_back(pass, PassOutcome::Cancelled);
        }
    }
}

/// One who waits, and is counted for as long.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, SeqCst);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}
