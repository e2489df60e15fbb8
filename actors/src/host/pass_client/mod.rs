//! The direct handle: submits passes and collects what they come to, without a mailbox.
//!
//! A pass is submitted in one of three ways, which decide where its end is told:
//!
//! - [`submit`](PassClient::submit): to whoever calls [`poll`](PassClient::poll) or
//!   [`recv`](PassClient::recv) next;
//! - [`call`](PassClient::call): to the future that it returns;
//! - [`prepare`](PassClient::prepare) and [`prepare_all`](PassClient::prepare_all): to the sink of
//!   [`route_to`](PassClient::route_to), in batches. The actors use these.
//!
//! The last two are served by the client's collector thread, which waits on the range's futex; it
//! starts with the first that needs it. A reply stays in its slot until it was taken, so nothing is
//! dropped, and who does not collect is `Busy` in the end.
//!
//! What is awaited needs a tokio runtime with its time driver, as actix has one. Nothing here looks
//! after the dead: some process must have a watchdog, as whoever starts `Passes` or workers has, or a
//! pass whose worker was killed waits until a worker joins in the dead one's row. In a child of a fork
//! every handle is an error or a panic that says so.

mod attention;
mod collector;
mod shared;

use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;
use std::time::Duration;

use meshwork_protocol::limits::PASS_LOOK_EVERY;
use meshwork_protocol::pass::patience::Spin;
use meshwork_protocol::pass::{ClientIndex, PassId};
use tokio::sync::oneshot;

pub use self::attention::Attention;
use self::shared::{Shared, TakeBack, Told};
use super::pass::{Completion, Pass, PassOutcome, SubmitError};
use super::pass_host::{JoinError, PassHost};
use super::pass_ring::WrittenSlot;

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// What it is called, in up to 48 bytes. A client that dies leaves its replies to the next of
    /// this name; one without a name, to nobody.
    pub name: String,
    /// How long a pass waits while no living worker has its closure; then it comes back as
    /// [`PassOutcome::NoWorker`].
    pub no_worker_after: Duration,
    /// How long replies to a predecessor of the name wait for [`poll`](PassClient::poll) or
    /// [`recv`](PassClient::recv), from the time when this client joined; then they are dropped, and
    /// counted as orphaned.
    pub adopted_for: Duration,
    /// What the collector thread does while there is nothing to collect.
    pub spin: Spin,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            no_worker_after: Duration::from_secs(5),
            adopted_for: Duration::from_secs(60),
            spin: Spin::Adaptive,
        }
    }
}

/// Where the ends of routed passes go.
pub type Sink = Box<dyn Fn(Vec<Completion<'static>>) + Send + Sync>;

/// The handle. Clones are the same client; it leaves when the last is dropped.
#[derive(Clone, Debug)]
pub struct PassClient(Arc<Shared>);

impl PassClient {
    /// Joins the passes of a directory as a client.
    ///
    /// # Errors
    ///
    /// [`JoinError`].
    pub fn join(host: &Arc<PassHost>, options: ClientOptions) -> Result<Self, JoinError> {
        let range = host.join_client(&options.name)?;
        let adopted = range.done().count();
        host.ring().header().adopted.fetch_add(adopted as u64, AcqRel);
        Ok(Self(Arc::new(Shared::new(host, range, options))))
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
        let written = self.0.write(self.0.reserve(pass)?, pass)?;
        Ok(self.0.publish(written, Told::Poll))
    }

    /// As [`submit`](Self::submit), once there is room. Whoever collects makes it.
    ///
    /// # Errors
    ///
    /// Any but `Busy`.
    pub async fn submit_when_room(&self, pass: &Pass<'_>) -> Result<PassId, SubmitError> {
        let written = self.0.write(self.0.reserve_when_room(pass).await?, pass)?;
        Ok(self.0.publish(written, Told::Poll))
    }

    /// Submits a pass, and awaits what it comes to. Dropping the future takes the pass back if no
    /// worker has claimed it, and forgets its end otherwise.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was submitted. While all slots are in use it waits for room.
    pub async fn call(&self, pass: &Pass<'_>) -> Result<Completion<'static>, CallError> {
        self.0.start_collector().map_err(CallError::Collector)?;
        let written = self.0.write(self.0.reserve_when_room(pass).await?, pass)?;
        let (sender, receiver) = oneshot::channel();
        let _awaits = self.0.expect_call(written.pass(), sender);
        let id = self.0.publish(written, Told::Caller);
        let guard = TakeBack::new(&self.0, id);
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
        self.0.start_collector().map_err(JoinError::Thread)
    }

    /// Writes a pass into a slot without submitting it, so that its end can be expected first. Without
    /// a sink, its end is for whoever polls.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was taken.
    pub fn prepare(&self, pass: &Pass<'_>) -> Result<Prepared<'_>, SubmitError> {
        let slot = self.0.write(self.0.reserve(pass)?, pass)?;
        Ok(Prepared { shared: &self.0, slot })
    }

    /// The same with several: all, or none.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was taken.
    pub fn prepare_all(&self, passes: &[Pass<'_>]) -> Result<PreparedBatch<'_>, SubmitError> {
        Ok(PreparedBatch { shared: &self.0, slots: self.0.write_all(passes)? })
    }

    /// Takes the collector thread's place while replies are expected soon: what a spinning worker does
    /// at once is back before that thread would have been woken. `None` while another does, or where
    /// it was mostly in vain.
    pub fn attend(&self) -> Option<Attention> {
        Attention::new(&self.0)
    }

    /// Awaits that a slot may be free, at most for as long as a client looks away.
    pub async fn some_room(&self) {
        let _ = tokio::time::timeout(PASS_LOOK_EVERY, self.0.room_made()).await;
    }

    /// Hands to `each` what has come to its end of the passes submitted for it. How many. Who submits
    /// between two polls, and polls again within 2 microseconds, gets nothing then: each look slows
    /// the workers down.
    ///
    /// Nobody else collects while `each` runs, so it must not wait for another end of this client. If
    /// it panics, the reply that it had is handed out again.
    #[inline]
    pub fn poll(&self, each: impl FnMut(Completion<'_>)) -> usize {
        self.0.poll(each)
    }

    /// Awaits the end of one pass that was submitted.
    ///
    /// # Errors
    ///
    /// [`CallError::Collector`], and `Forked`.
    pub async fn recv(&self) -> Result<Completion<'static>, CallError> {
        if !self.0.host.ring().is_here() {
            return Err(SubmitError::Forked.into());
        }
        self.0.start_collector().map_err(CallError::Collector)?;
        loop {
            let news = self.0.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            if let Some(one) = self.0.take_one() {
                // Others may be left for whoever else waits.
                self.0.news.notify_one();
                return Ok(one);
            }
            // Another thread may be collecting in this moment, and leave something.
            let _ = tokio::time::timeout(PASS_LOOK_EVERY, news).await;
        }
    }

    /// Takes a pass back that no worker has claimed yet. It ends as [`PassOutcome::Cancelled`], told
    /// like any other end. False if it is too late.
    pub fn cancel(&self, pass: PassId) -> bool {
        self.0.take_back(pass, PassOutcome::Cancelled)
    }

    /// Does so with every pass of this tag. How many were taken back.
    pub fn cancel_tagged(&self, tag: u64) -> usize {
        let tagged: Vec<PassId> = self.0.range.tagged(tag).collect();
        tagged.into_iter().filter(|pass| self.cancel(*pass)).count()
    }
}

/// A pass that was written into a slot, and whose end the sink will be told. Dropped, it was nothing.
#[derive(Debug)]
pub struct Prepared<'c> {
    shared: &'c Shared,
    slot: WrittenSlot<'c>,
}

impl Prepared<'_> {
    /// Which pass it will be.
    pub fn pass(&self) -> PassId {
        self.slot.pass()
    }

    /// Submits it.
    pub fn submit(self) -> PassId {
        self.shared.publish(self.slot, self.shared.routed())
    }
}

/// Passes that were written into slots, as [`Prepared`] is.
#[derive(Debug)]
pub struct PreparedBatch<'c> {
    shared: &'c Shared,
    slots: Vec<WrittenSlot<'c>>,
}

impl PreparedBatch<'_> {
    /// Which passes they will be, in their order.
    pub fn passes(&self) -> impl Iterator<Item = PassId> {
        self.slots.iter().map(WrittenSlot::pass)
    }

    /// Submits them.
    pub fn submit(self) {
        let told = self.shared.routed();
        for slot in self.slots {
            self.shared.publish(slot, told);
        }
    }
}

/// Why the end of a pass cannot be awaited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was not submitted.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The thread that collects replies cannot be started.
    #[error("cannot start the thread that collects replies: {0}")]
    Collector(std::io::Error),
    /// The client has stopped; the pass may have been run.
    #[error("the client has stopped")]
    Stopped,
}
