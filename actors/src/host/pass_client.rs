//! The direct handle: submits passes and collects what they come to, without a mailbox.
//!
//! A pass is submitted in one of three ways, which decide where its end is told:
//!
//! - [`submit`](PassClient::submit): to whoever calls [`poll`](PassClient::poll) or
//!   [`recv`](PassClient::recv) next;
//! - [`call`](PassClient::call): to the future that it returns;
//! - [`Reserved::submit`]: to the sink of
//!   [`route_to`](PassClient::route_to), in batches. The actors use this one.
//!
//! The last two are served by the client's collector thread, which waits on the range's futex; it
//! starts with the first that needs it. A reply stays in its slot until it was taken, so nothing is
//! dropped, and who does not collect is `Busy` in the end.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use meshwork_protocol::pass::frame::{Call, INLINE_BYTES};
use meshwork_protocol::pass::layout::WORD_SLOTS;
use meshwork_protocol::pass::{ClientIndex, ClosureId, PassId, WorkerIndex};
use tokio::sync::{Notify, oneshot};

use super::pass::{Completion, Pass, PassOutcome, SubmitError};
use super::pass_host::{JoinError, PassHost};
use super::pass_ring::{FreeSlot, PassRing, SlotRange, wait, wake};
use super::patience::{Patience, Spin};

/// How often a client looks at its slots themselves: for replies that nobody announced, and for
/// passes that nobody can run.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Polls without a reply between two readings of the clock.
const POLLS: u32 = 4_096;

/// Passes under way from which on a poll lets replies gather, and for how many pauses of the
/// processor (about 40 ns each): less than a microsecond, when there are many times that to do.
const GATHER_FROM: u32 = 64;
const GATHER_PAUSES: u32 = 12;

/// Batches after which the collector thread looks whether it should look at the slots themselves.
const BATCHES: u32 = 1_024;

/// How long [`Attention`] goes on after the last reply: a small part of a wake. And between two looks
/// of it, so many at the completions.
const ATTENTION: Duration = Duration::from_micros(3);
const ATTENTION_LOOKS: u32 = 8;

/// Times in a row that attention is in vain before it is paid only at every so many submissions.
const HOPES: u32 = 8;
const HOPELESS_TRIES: u32 = 64;

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// What it is called, in up to 48 bytes. A client that dies leaves its replies to the next of
    /// this name.
    pub name: String,
    /// How long a pass waits while no living worker has its closure; then it comes back as
    /// [`PassOutcome::NoWorker`].
    pub no_worker_after: Duration,
    /// What the collector thread does while there is nothing to collect.
    pub spin: Spin,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { name: String::new(), no_worker_after: Duration::from_secs(5), spin: Spin::Adaptive }
    }
}

/// Where the ends of routed passes go.
pub type Sink = Box<dyn Fn(Vec<Completion<'static>>) + Send + Sync>;

/// The handle. Clones are the same client; it leaves when the last is dropped.
#[derive(Clone, Debug)]
pub struct PassClient(Arc<Shared>);

struct Shared {
    host: Arc<PassHost>,
    range: SlotRange,
    options: ClientOptions,
    limit: usize,
    /// The rows of closures that were looked up.
    rows: DashMap<ClosureId, u16>,
    /// A bit for each slot whose end a future awaits, or the sink.
    routed: Box<[AtomicU64]>,
    waiters: Box<[Mutex<Option<oneshot::Sender<Completion<'static>>>>]>,
    sink: OnceLock<Sink>,
    /// Whether the collector thread was started.
    has_collector: AtomicBool,
    /// Ends of passes that were submitted for `poll`, and that no slot holds.
    returned: Mutex<VecDeque<Completion<'static>>>,
    has_returned: AtomicBool,
    empty_polls: AtomicU32,
    sweep: Mutex<Sweep>,
    /// Whether someone has taken the collector thread's place.
    attended: AtomicBool,
    /// Whether that found something lately.
    hope: AtomicU32,
    attends: AtomicU32,
    room_wanted: AtomicUsize,
    room: Notify,
    news: Notify,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "client {} ({:?})", self.range.client().0, self.options.name)
    }
}

/// What a client saw when it last looked at its slots.
struct Sweep {
    next: Instant,
    /// For each slot, which pass was seen waiting without a worker, and since when.
    unserved: Vec<Option<(PassId, Instant)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PassClient {
    /// Joins the passes of a directory as a client.
    ///
    /// # Errors
    ///
    /// [`JoinError`].
    pub fn join(host: &Arc<PassHost>, options: ClientOptions) -> Result<Self, JoinError> {
        let range = host.join_client(&options.name)?;
        let slots = host.ring().layout().geometry.slots_per_client as usize;
        let limit = (host.ring().layout().geometry.payload_bytes as usize).max(INLINE_BYTES);
        let adopted = range.done().count();
        host.ring().header().adopted.fetch_add(adopted as u64, AcqRel);
        Ok(Self(Arc::new(Shared {
            host: Arc::clone(host),
            range,
            options,
            limit,
            rows: DashMap::new(),
            routed: (0..slots / WORD_SLOTS as usize).map(|_| AtomicU64::new(0)).collect(),
            waiters: (0..slots).map(|_| Mutex::new(None)).collect(),
            sink: OnceLock::new(),
            has_collector: AtomicBool::new(false),
            returned: Mutex::default(),
            has_returned: AtomicBool::new(false),
            empty_polls: AtomicU32::new(0),
            sweep: Mutex::new(Sweep { next: Instant::now(), unserved: vec![None; slots] }),
            hope: AtomicU32::new(HOPES),
            attends: AtomicU32::new(0),
            attended: AtomicBool::new(false),
            room_wanted: AtomicUsize::new(0),
            room: Notify::new(),
            news: Notify::new(),
        })))
    }

    /// Its row.
    pub fn index(&self) -> ClientIndex {
        self.0.range.client()
    }

    /// The host that it joined by.
    pub fn host(&self) -> &Arc<PassHost> {
        &self.0.host
    }

    /// Passes that could be submitted now.
    pub fn room(&self) -> u32 {
        self.0.range.room()
    }

    /// Submits a pass, for [`poll`](Self::poll) or [`recv`](Self::recv).
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was submitted.
    #[inline]
    pub fn submit(&self, pass: &Pass<'_>) -> Result<PassId, SubmitError> {
        let free = self.0.reserve(pass)?;
        self.0.publish(free, pass)
    }

    /// As [`submit`](Self::submit), once there is room. Whoever collects makes it.
    ///
    /// # Errors
    ///
    /// Any but `Busy`.
    pub async fn submit_when_room(&self, pass: &Pass<'_>) -> Result<PassId, SubmitError> {
        let free = self.0.reserve_when_room(pass).await?;
        self.0.publish(free, pass)
    }

    /// Submits a pass, and awaits what it comes to. Dropping the future takes the pass back if no
    /// worker has claimed it, and forgets its end otherwise.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was submitted. While all slots are in use it waits for room.
    pub async fn call(&self, pass: &Pass<'_>) -> Result<Completion<'static>, CallError> {
        self.0.start_collector()?;
        let free = self.0.reserve_when_room(pass).await?;
        let id = free.pass();
        let (sender, receiver) = oneshot::channel();
        *lock(&self.0.waiters[self.0.place(id.slot)]) = Some(sender);
        self.0.set_routed(id.slot, true);
        if let Err(error) = self.0.publish(free, pass) {
            self.0.expect_nothing(id.slot);
            return Err(error.into());
        }
        let guard = TakeBack { shared: &self.0, pass: Some(id) };
        let completion = receiver.await.map_err(|_| CallError::Stopped)?;
        guard.ended();
        Ok(completion)
    }

    /// Where the ends of routed passes go from now on. The first call counts.
    ///
    /// # Errors
    ///
    /// The collector thread cannot be started.
    pub fn route_to(&self, sink: Sink) -> Result<(), JoinError> {
        let _ = self.0.sink.set(sink);
        self.0.start_collector()
    }

    /// Takes a slot for a routed pass, so that its end can be expected before it is submitted.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was taken.
    pub fn reserve(&self, pass: &Pass<'_>) -> Result<Reserved<'_>, SubmitError> {
        Ok(Reserved { shared: &self.0, free: self.0.reserve(pass)? })
    }

    /// Takes the collector thread's place while replies are expected soon: what a spinning worker does
    /// at once is back before that thread would have been woken. `None` while another does, or where
    /// it was mostly in vain.
    pub fn attend(&self) -> Option<Attention> {
        Attention::new(&self.0)
    }

    /// Awaits that a slot may be free, at most for as long as a client looks away.
    pub async fn some_room(&self) {
        let _ = tokio::time::timeout(LOOK_EVERY, self.0.room_made()).await;
    }

    /// Hands to `each` what has come to its end of the passes submitted for it. How many.
    #[inline]
    pub fn poll(&self, mut each: impl FnMut(Completion<'_>)) -> usize {
        let shared = &*self.0;
        if !shared.range.has_news()
            && !shared.range.has_left()
            && !shared.has_returned.load(Acquire)
        {
            shared.nothing_polled();
            return 0;
        }
        shared.let_gather();
        shared.collect(true, &mut |_| {}, |completion| {
            each(completion);
            true
        }) + shared.take_returned(each)
    }

    /// Awaits the end of one pass that was submitted.
    ///
    /// # Errors
    ///
    /// The collector thread cannot be started.
    pub async fn recv(&self) -> Result<Completion<'static>, JoinError> {
        self.0.start_collector()?;
        loop {
            let news = self.0.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            let mut one = None;
            if let Some(returned) = self.0.pop_returned() {
                return Ok(returned);
            }
            self.0.collect(true, &mut |_| {}, |completion| {
                let is_first = one.is_none();
                if is_first {
                    one = Some(completion.into_owned());
                }
                is_first
            });
            if let Some(completion) = one {
                // Others may be left for whoever else waits.
                self.0.news.notify_one();
                return Ok(completion);
            }
            // Another thread may be collecting in this moment, and leave something.
            let _ = tokio::time::timeout(LOOK_EVERY, news).await;
        }
    }

    /// Takes a pass back that no worker has claimed yet. It ends as [`PassOutcome::Cancelled`], told
    /// like any other end. False if it is too late.
    pub fn cancel(&self, pass: PassId) -> bool {
        self.0.take_back(pass, PassOutcome::Cancelled)
    }
}

/// A slot that was taken for a routed pass.
#[derive(Debug)]
pub struct Reserved<'c> {
    shared: &'c Shared,
    free: FreeSlot<'c>,
}

impl Reserved<'_> {
    /// The pass that it will hold.
    pub fn pass(&self) -> PassId {
        self.free.pass()
    }

    /// Puts memory behind what the pass needs, so that submitting it cannot fail for that.
    ///
    /// # Errors
    ///
    /// [`SubmitError::NoSpace`].
    pub fn make_room(&self, pass: &Pass<'_>) -> Result<(), SubmitError> {
        self.free.make_room(pass.args.len()).map_err(SubmitError::NoSpace)
    }

    /// Submits the pass; its end goes to the sink.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was submitted.
    pub fn submit(self, pass: &Pass<'_>) -> Result<PassId, SubmitError> {
        let slot = self.free.pass().slot;
        self.shared.set_routed(slot, true);
        let submitted = self.shared.publish(self.free, pass);
        if submitted.is_err() {
            self.shared.expect_nothing(slot);
        }
        submitted
    }
}

/// Why a call has no end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was not submitted.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// Nobody could collect it.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The client has stopped; the pass may have been run.
    #[error("the client has stopped")]
    Stopped,
}

/// The collector thread's part, taken over for a while. Given back when dropped.
pub struct Attention {
    shared: Arc<Shared>,
    /// Whether that thread slept.
    slept: bool,
    found: bool,
    last: Instant,
}

impl Attention {
    fn new(shared: &Arc<Shared>) -> Option<Self> {
        let is_hopeless = shared.hope.load(Relaxed) == 0
            && !shared.attends.fetch_add(1, Relaxed).is_multiple_of(HOPELESS_TRIES);
        if is_hopeless || shared.attended.swap(true, AcqRel) {
            return None;
        }
        // While this one looks, nobody need be woken for it.
        let sleeping = shared.host.ring().client(shared.range.client()).sleeping();
        let slept = sleeping.swap(0, SeqCst) != 0;
        Some(Self { shared: Arc::clone(shared), slept, found: false, last: Instant::now() })
    }

    /// Collects what is there. Whether to look again soon: until nothing came for 3 microseconds, or
    /// nothing is under way.
    pub fn look(&mut self) -> bool {
        for _ in 0..ATTENTION_LOOKS {
            if self.shared.range.has_news() {
                self.shared.collect_routed();
                self.found = true;
                self.last = Instant::now();
                return self.shared.routed.iter().any(|word| word.load(Relaxed) != 0);
            }
            std::hint::spin_loop();
        }
        self.last.elapsed() < ATTENTION
    }
}

impl Drop for Attention {
    fn drop(&mut self) {
        let shared = &*self.shared;
        if !shared.host.ring().is_here() {
            return;
        }
        if self.slept {
            let ring = shared.host.ring();
            ring.board().client_falls_asleep(ring.client(shared.range.client()).sleeping());
            if shared.range.has_news() {
                shared.collect_routed();
            }
        }
        let hope = shared.hope.load(Relaxed);
        shared.hope.store(if self.found { HOPES } else { hope.saturating_sub(1) }, Relaxed);
        shared.attended.store(false, Release);
    }
}

/// Takes a pass back when whoever called it does not wait any longer.
struct TakeBack<'c> {
    shared: &'c Arc<Shared>,
    pass: Option<PassId>,
}

impl TakeBack<'_> {
    fn ended(mut self) {
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

impl Shared {
    fn place(&self, slot: u32) -> usize {
        (slot % self.waiters.len() as u32) as usize
    }

    fn is_routed(&self, slot: u32) -> bool {
        let place = self.place(slot);
        self.routed[place / 64].load(Acquire) & 1 << (place % 64) != 0
    }

    fn set_routed(&self, slot: u32, routed: bool) {
        let place = self.place(slot);
        let (word, bit) = (&self.routed[place / 64], 1 << (place % 64));
        if routed {
            word.fetch_or(bit, AcqRel);
        } else {
            word.fetch_and(!bit, AcqRel);
        }
    }

    #[cold]
    fn expect_nothing(&self, slot: u32) {
        self.set_routed(slot, false);
        drop(lock(&self.waiters[self.place(slot)]).take());
    }

    #[inline]
    fn reserve(&self, pass: &Pass<'_>) -> Result<FreeSlot<'_>, SubmitError> {
        if pass.args.len() > self.limit {
            return Err(SubmitError::TooLong { bytes: pass.args.len(), limit: self.limit });
        }
        if !self.host.ring().is_here() {
            return Err(SubmitError::Forked);
        }
        self.range.reserve().ok_or(SubmitError::Busy(self.waiters.len() as u32))
    }

    async fn reserve_when_room(&self, pass: &Pass<'_>) -> Result<FreeSlot<'_>, SubmitError> {
        loop {
            match self.reserve(pass) {
                Err(SubmitError::Busy(_)) => {
                    let _ = tokio::time::timeout(LOOK_EVERY, self.room_made()).await;
                }
                other => return other,
            }
        }
    }

    async fn room_made(&self) {
        let _wanted = Wanted::count(&self.room_wanted);
        let made = self.room.notified();
        tokio::pin!(made);
        made.as_mut().enable();
        if self.range.room() == 0 {
            made.await;
        }
    }

    #[inline]
    fn publish(&self, free: FreeSlot<'_>, pass: &Pass<'_>) -> Result<PassId, SubmitError> {
        let call = Call {
            closure: pass.closure,
            bytes: pass.args.len() as u32,
            attempts: pass.attempts.max(1),
            priority: pass.priority,
            timed: pass.deadline.is_some(),
        };
        let deadline_us = pass.deadline.map_or(0, meshwork_protocol::time::micros);
        let id =
            free.publish(call, &pass.args, pass.tag, deadline_us).map_err(SubmitError::NoSpace)?;
        self.host.ring().wake_worker(|worker| self.can_run(worker, pass.closure));
        Ok(id)
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

    /// Hands out ends: routed ones to their futures or into `batch`, the others to `each`, which says
    /// whether it takes them.
    fn collect(
        &self,
        left: bool,
        batch: &mut dyn FnMut(Completion<'static>),
        mut each: impl FnMut(Completion<'_>) -> bool,
    ) -> usize {
        let Some(mut drain) = self.range.drain() else { return 0 };
        let mut taken = 0;
        let collected = drain.collect(left, |arrived| {
            if self.is_routed(arrived.pass.slot) {
                self.deliver(Completion::from(arrived).into_owned(), batch);
                return true;
            }
            let takes = each(arrived.into());
            taken += usize::from(takes);
            takes
        });
        drop(drain);
        if collected > 0 && self.room_wanted.load(SeqCst) > 0 {
            self.room.notify_waiters();
        }
        taken
    }

    fn deliver(&self, end: Completion<'static>, batch: &mut dyn FnMut(Completion<'static>)) {
        self.set_routed(end.pass.slot, false);
        match lock(&self.waiters[self.place(end.pass.slot)]).take() {
            // Whoever called may have given up.
            Some(waiter) => drop(waiter.send(end)),
            None => batch(end),
        }
    }

    fn take_back(&self, pass: PassId, outcome: PassOutcome<'static>) -> bool {
        if !self.host.ring().is_here() {
            return false;
        }
        let is_routed = self.is_routed(pass.slot);
        let Some(tag) = self.range.take_back(pass, |_| {
            // Before the slot can be another pass's.
            if is_routed {
                self.set_routed(pass.slot, false);
            }
            lock(&self.waiters[self.place(pass.slot)]).take()
        }) else {
            return false;
        };
        let (tag, waiter) = tag;
        let end = Completion { pass, tag, attempt: 0, outcome };
        match (waiter, is_routed, self.sink.get()) {
            (Some(waiter), _, _) => drop(waiter.send(end)),
            (None, true, Some(sink)) => sink(vec![end]),
            _ => {
                lock(&self.returned).push_back(end);
                self.has_returned.store(true, SeqCst);
                self.news.notify_one();
            }
        }
        if self.room_wanted.load(SeqCst) > 0 {
            self.room.notify_waiters();
        }
        true
    }

    /// Hands routed ends to their futures and to the sink; the others stay.
    fn collect_routed(&self) {
        let mut batch = Vec::new();
        let mut left = 0;
        self.collect(false, &mut |end| batch.push(end), |_| {
            left += 1;
            false
        });
        if left > 0 {
            self.news.notify_one();
        }
        if !batch.is_empty()
            && let Some(sink) = self.sink.get()
        {
            sink(batch);
        }
    }

    fn pop_returned(&self) -> Option<Completion<'static>> {
        if !self.has_returned.load(Acquire) {
            return None;
        }
        let mut returned = lock(&self.returned);
        let end = returned.pop_front();
        self.has_returned.store(!returned.is_empty(), SeqCst);
        end
    }

    fn take_returned(&self, mut each: impl FnMut(Completion<'_>)) -> usize {
        std::iter::from_fn(|| self.pop_returned()).map(&mut each).count()
    }

    /// While many are under way, waits a moment for more of them to come: to collect them singly
    /// would take the lines that they come on from the workers each time.
    #[inline(always)]
    fn let_gather(&self) {
        let under_way = self.waiters.len() as u32 - self.range.room();
        if under_way >= GATHER_FROM {
            for _ in 0..GATHER_PAUSES {
                std::hint::spin_loop();
            }
        }
    }

    #[inline(always)]
    fn nothing_polled(&self) {
        let polls = self.empty_polls.load(Relaxed).wrapping_add(1);
        self.empty_polls.store(polls, Relaxed);
        if polls.is_multiple_of(POLLS) {
            self.sweep_if_due();
        }
    }

    #[cold]
    fn sweep_if_due(&self) {
        let Ok(mut sweep) = self.sweep.try_lock() else { return };
        let now = Instant::now();
        if now < sweep.next {
            return;
        }
        sweep.next = now + LOOK_EVERY;
        self.range.find_unannounced();
        let mut overdue = Vec::new();
        for (pass, closure, _) in self.range.waiting() {
            let place = self.place(pass.slot);
            if self.is_served(closure) {
                sweep.unserved[place] = None;
                continue;
            }
            match sweep.unserved[place] {
                Some((seen, since)) if seen == pass => {
                    if now.duration_since(since) >= self.options.no_worker_after {
                        overdue.push(pass);
                    }
                }
                _ => sweep.unserved[place] = Some((pass, now)),
            }
        }
        drop(sweep);
        for pass in overdue {
            self.take_back(pass, PassOutcome::NoWorker);
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

    fn start_collector(self: &Arc<Self>) -> Result<(), JoinError> {
        if self.has_collector.load(Relaxed) || self.has_collector.swap(true, AcqRel) {
            return Ok(());
        }
        let (shared, ring) = (Arc::downgrade(self), Arc::clone(self.host.ring()));
        let (client, spin) = (self.range.client(), self.options.spin);
        std::thread::Builder::new()
            .name(format!("pass-collector-{}", client.0))
            .spawn(move || collect_forever(&shared, &ring, client, spin))
            .map(drop)
            .map_err(|error| {
                // The next who needs it tries again.
                self.has_collector.store(false, Release);
                JoinError::Thread(error)
            })
    }
}

fn runs(ring: &PassRing, worker: WorkerIndex, closure_row: u16) -> bool {
    let words = &ring.worker(worker).runs;
    words[usize::from(closure_row) / 64].load(Relaxed) & 1 << (closure_row % 64) != 0
}

/// The collector thread: ends with the client.
fn collect_forever(shared: &Weak<Shared>, ring: &PassRing, client: ClientIndex, spin: Spin) {
    let row = ring.client(client);
    let mut patience = Patience::new(spin);
    let mut rounds = 0u32;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        if !ring.is_here() {
            return;
        }
        rounds = rounds.wrapping_add(1);
        if shared.range.has_news() && !rounds.is_multiple_of(BATCHES) {
            shared.collect_routed();
            patience.found();
            continue;
        }
        if !rounds.is_multiple_of(BATCHES) && patience.look_again() {
            continue;
        }
        shared.sweep_if_due();
        let seen = row.wake_word().load(Acquire);
        // In the total order: `completions`. Whoever announces after this wakes; what was announced
        // before is seen by the look that follows.
        ring.board().client_falls_asleep(row.sleeping());
        let has_news = shared.range.has_news();
        drop(shared);
        if !has_news {
            wait(row.wake_word(), seen, LOOK_EVERY);
        }
        row.sleeping().swap(0, AcqRel);
    }
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

/// Someone wants room.
struct Wanted<'a>(&'a AtomicUsize);

impl<'a> Wanted<'a> {
    fn count(wanted: &'a AtomicUsize) -> Self {
        wanted.fetch_add(1, SeqCst);
        Self(wanted)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}
