//! `PassSubmitter`: hands passes to workers of any process.
//!
//! Owns admission to this process's range of slots. Receives [`Submit`], [`SubmitBatch`] and [`Cancel`]. Sends
//! `ExpectPass` and `ExpectPasses` to ResultCollector; the collector thread of the client, which it
//! sets up, sends `Completed` there. On death the node stops; what was submitted
//! runs on, and waits for the next client of the name.
//!
//! ResultCollector hears of a pass before it is submitted, so its end never comes too early.

use actix::prelude::*;
use futures_util::future::LocalBoxFuture;
use tokio::sync::oneshot;

use super::pass::{Completion, Pass, SubmitError};
use super::pass_client::PassClient;
use crate::work::pass_awaits::{ExpectPass, ExpectPasses};

/// Submit a pass. Answered when it has ended; `Busy` at once while all slots are in use.
#[derive(Message)]
#[rtype(result = "Result<Completion<'static>, SubmitError>")]
pub struct Submit(pub Pass<'static>);

/// Submit several passes: all, or none. Answered when all have ended, in their order.
#[derive(Message)]
#[rtype(result = "Result<Vec<Completion<'static>>, SubmitError>")]
pub struct SubmitBatch(pub Vec<Pass<'static>>);

/// Take back the passes of this tag that no worker has claimed yet. Answered with how many; each ends
/// as cancelled for whoever submitted it.
#[derive(Message)]
#[rtype(result = "usize")]
pub struct Cancel(pub u64);

/// Whom the submitter tells.
pub struct Peers {
    /// Who awaits one.
    pub expect: Recipient<ExpectPass>,
    /// Who awaits several.
    pub expect_all: Recipient<ExpectPasses>,
}

/// The actor.
pub struct PassSubmitter {
    client: PassClient,
    peers: Peers,
}

impl PassSubmitter {
    /// A submitter for a client whose sink is set.
    pub fn new(client: PassClient, peers: Peers) -> Self {
        Self { client, peers }
    }

    fn submit(
        &self,
        pass: &Pass<'static>,
    ) -> Result<oneshot::Receiver<Completion<'static>>, SubmitError> {
        let prepared = self.client.prepare(pass)?;
        let (reply, answer) = oneshot::channel();
        self.peers.expect.do_send(ExpectPass { pass: prepared.pass(), reply });
        prepared.submit();
        Ok(answer)
    }

    /// Looks for replies from this arbiter, between its other tasks, for as long as they come quickly.
    fn attend(&self) {
        if let Some(mut attention) = self.client.attend() {
            actix::spawn(async move {
                while attention.look() {
                    tokio::task::yield_now().await;
                }
            });
        }
    }

    fn submit_all(
        &self,
        passes: &[Pass<'static>],
    ) -> Result<oneshot::Receiver<Vec<Completion<'static>>>, SubmitError> {
        let prepared = self.client.prepare_all(passes)?;
        let (reply, answer) = oneshot::channel();
        let passes = prepared.passes().collect();
        self.peers.expect_all.do_send(ExpectPasses { passes, reply });
        prepared.submit();
        Ok(answer)
    }
}

impl Actor for PassSubmitter {
    type Context = Context<Self>;
}

impl Handler<Submit> for PassSubmitter {
    type Result = LocalBoxFuture<'static, Result<Completion<'static>, SubmitError>>;

    fn handle(&mut self, Submit(pass): Submit, _: &mut Self::Context) -> Self::Result {
        match self.submit(&pass) {
            Ok(answer) => {
                self.attend();
                Box::pin(async move { answer.await.map_err(|_| SubmitError::Stopped) })
            }
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }
}

impl Handler<SubmitBatch> for PassSubmitter {
    type Result = LocalBoxFuture<'static, Result<Vec<Completion<'static>>, SubmitError>>;

    fn handle(&mut self, SubmitBatch(passes): SubmitBatch, _: &mut Self::Context) -> Self::Result {
        if passes.is_empty() {
            return Box::pin(async { Ok(Vec::new()) });
        }
        match self.submit_all(&passes) {
            Ok(answer) => {
                self.attend();
                Box::pin(async move { answer.await.map_err(|_| SubmitError::Stopped) })
            }
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }
}

impl Handler<Cancel> for PassSubmitter {
    type Result = usize;

    fn handle(&mut self, Cancel(tag): Cancel, _: &mut Self::Context) -> usize {
        self.client.cancel_tagged(tag)
    }
}
