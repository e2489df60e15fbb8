//! The one way to start an actor, and to end it.
//!
//! The address exists before the actor does ([`Slot`]), so actors that know each other need no
//! second step, on whichever arbiters they run. The future of every actor is watched: one that
//! panics, or ends without being told to, is reported with its name and reason, and its node stops;
//! a half-known state is worse than a restart.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use actix::dev::channel::{self, AddressReceiver};
use actix::prelude::*;
use futures_util::FutureExt;
use meshwork_protocol::time::Instant;
use tokio::sync::{mpsc, oneshot};

use crate::clock::Clock;

/// An address whose actor is still to be started.
pub struct Slot<A: Actor> {
    name: &'static str,
    addr: Addr<A>,
    receiver: AddressReceiver<A>,
}

impl<A> Slot<A>
where
    A: Actor<Context = Context<A>>,
{
    /// A mailbox of `bound` messages. `send` waits for room in it and `try_send` refuses; `do_send`
    /// ignores it, and is for senders that are bounded elsewhere.
    pub fn new(name: &'static str, bound: usize) -> Self {
        let (sender, receiver) = channel::channel(bound);
        Self { name, addr: Addr::new(sender), receiver }
    }

    /// The actor's type.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The address.
    pub fn addr(&self) -> Addr<A> {
        self.addr.clone()
    }

    /// Starts the actor on `arbiter`, where `make` builds it.
    pub fn start<F>(self, arbiter: &ArbiterHandle, deaths: &Deaths, make: F) -> Running
    where
        F: FnOnce(&mut Context<A>) -> A + Send + 'static,
    {
        let Self { name, addr, receiver } = self;
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, done) = oneshot::channel::<()>();
        let deaths = deaths.clone();
        let spawned = arbiter.spawn_fn(move || {
            actix::spawn(async move {
                // Held until the actor runs, so that its mailbox is never seen unconnected.
                let addr = addr;
                let life = AssertUnwindSafe(async move {
                    let mut context = Context::with_receiver(receiver);
                    let actor = make(&mut context);
                    let future = context.into_future(actor);
                    drop(addr);
                    future.await;
                });
                let end = tokio::select! {
                    end = life.catch_unwind() => Some(end),
                    _ = stopped => None,
                };
                match end {
                    None => {}
                    Some(Ok(())) => deaths.report(name, "it ended by itself".into()),
                    Some(Err(panic)) => deaths.report(name, panic_text(panic.as_ref())),
                }
                drop(ended);
            });
        });
        if !spawned {
            tracing::error!(actor = name, "its arbiter has stopped");
        }
        Running { name, stop: Some(stop), done }
    }
}

/// An actor that was started.
pub struct Running {
    name: &'static str,
    stop: Option<oneshot::Sender<()>>,
    done: oneshot::Receiver<()>,
}

impl Running {
    /// Its type.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Ends the actor now, whatever waits in its mailbox, and waits until it is gone.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        // The sender is dropped, never used: an error is the signal.
        let _ = (&mut self.done).await;
    }
}

/// Where the ends of actors are reported.
#[derive(Clone)]
pub struct Deaths {
    sender: mpsc::UnboundedSender<Death>,
    expected: Arc<AtomicBool>,
}

/// An actor that ended by itself.
#[derive(Clone, Debug)]
pub struct Death {
    /// Its type.
    pub actor: &'static str,
    /// The panic's text, or that it just ended.
    pub reason: String,
}

impl Deaths {
    /// A reporter, and where its reports arrive: one an actor at most.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Death>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self { sender, expected: Arc::default() }, receiver)
    }

    /// The node ends: that its actors do is no news from now on.
    pub fn expect(&self) {
        self.expected.store(true, Ordering::Relaxed);
    }

    /// Reports an actor's end, or a fault that must end its node.
    pub fn report(&self, actor: &'static str, reason: String) {
        if self.expected.load(Ordering::Relaxed) {
            tracing::debug!(actor, reason, "an actor ended with its node");
            return;
        }
        tracing::error!(actor, reason, "the node stops");
        // A node that is already gone needs no report.
        let _ = self.sender.send(Death { actor, reason });
    }
}

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a text".into())
}

/// An actor that carries a machine with a timeout.
pub trait Timed: Actor<Context = Context<Self>> {
    /// Its alarm.
    fn alarm(&mut self) -> &mut Alarm;
    /// Called when the alarm goes off: tells the machine, then sets the alarm again.
    fn due(&mut self, ctx: &mut Context<Self>);
}

/// The one timer of an actor: it goes off at, or soon after, the earliest deadline that was set.
#[derive(Default)]
pub struct Alarm(Option<(Instant, SpawnHandle)>);

impl Alarm {
    /// Goes off at `at`, unless it does so earlier anyway; being early is harmless, because every
    /// machine checks the time itself.
    pub fn set<A: Timed>(&mut self, ctx: &mut Context<A>, clock: Clock, at: Option<Instant>) {
        let Some(at) = at else { return };
        if let Some((armed, handle)) = self.0 {
            if armed <= at {
                return;
            }
            ctx.cancel_future(handle);
        }
        let delay = at.saturating_since(clock.now());
        let handle = ctx.run_later(delay, |actor, ctx| {
            actor.alarm().0 = None;
            actor.due(ctx);
        });
        self.0 = Some((at, handle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl Actor for Echo {
        type Context = Context<Self>;
    }

    #[derive(Message)]
    #[rtype(result = "u32")]
    struct Say(u32);

    impl Handler<Say> for Echo {
        type Result = u32;

        fn handle(&mut self, Say(n): Say, _: &mut Context<Self>) -> u32 {
            assert_ne!(n, 13, "unlucky");
            n
        }
    }

    #[actix::test]
    async fn messages_sent_before_the_start_are_answered_after_it() {
        let (deaths, _reports) = Deaths::new();
        let slot = Slot::<Echo>::new("Echo", 8);
        let early = slot.addr().send(Say(7));
        let running = slot.start(&Arbiter::current(), &deaths, |_| Echo);
        assert_eq!(early.await.unwrap(), 7);
        running.stop().await;
    }

    #[actix::test]
    async fn a_panic_is_reported_with_its_text_and_a_stop_is_not() {
        let (deaths, mut reports) = Deaths::new();
        let slot = Slot::<Echo>::new("Echo", 8);
        let addr = slot.addr();
        let running = slot.start(&Arbiter::current(), &deaths, |_| Echo);
        assert!(addr.send(Say(13)).await.is_err());
        let death = reports.recv().await.unwrap();
        assert_eq!(death.actor, "Echo");
        assert!(death.reason.contains("unlucky"), "{}", death.reason);
        running.stop().await;

        let slot = Slot::<Echo>::new("Echo", 8);
        let addr = slot.addr();
        let running = slot.start(&Arbiter::current(), &deaths, |_| Echo);
        running.stop().await;
        assert!(addr.send(Say(1)).await.is_err(), "it is gone");
        assert!(reports.try_recv().is_err());
    }
}
