//! Who awaits which passes, and how the ends of passes reach the collector of results.

use std::cell::RefCell;
use std::rc::Rc;

use actix::prelude::*;
use meshwork_protocol::pass::PassId;
use tokio::sync::oneshot;

use crate::host::pass::{Completion, PassOutcome};

/// These passes are about to be submitted: answer when all have ended, in this order.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ExpectPasses {
    /// Which.
    pub passes: Vec<PassId>,
    /// Whom to answer.
    pub reply: oneshot::Sender<Vec<Completion<'static>>>,
}

/// A pass is about to be submitted: answer when it has ended.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ExpectPass {
    /// Which.
    pub pass: PassId,
    /// Whom to answer.
    pub reply: oneshot::Sender<Completion<'static>>,
}

/// These passes have ended.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Completed(pub Vec<Completion<'static>>);

/// Those who await passes of one client.
///
/// A slot may be another pass's before the end of its last one is told here, so the passes are what
/// counts. There are no more than PassSubmitter's mailbox and the client's slots hold together.
#[derive(Default)]
pub struct PassAwaits {
    /// By slot; of each, by generation.
    places: Vec<Vec<(u64, Waiter)>>,
}

enum Waiter {
    One(oneshot::Sender<Completion<'static>>),
    Many(Rc<RefCell<Batch>>, usize),
}

struct Batch {
    /// Of each pass; those that are missing as if they were never begun.
    ends: Vec<Completion<'static>>,
    missing: usize,
    reply: Option<oneshot::Sender<Vec<Completion<'static>>>>,
}

fn missing(pass: PassId) -> Completion<'static> {
    Completion { pass, tag: 0, attempt: 0, outcome: PassOutcome::Cancelled }
}

impl PassAwaits {
    /// Someone awaits a pass.
    pub fn expect_one(&mut self, ExpectPass { pass, reply }: ExpectPass) {
        self.put(pass, Waiter::One(reply));
    }

    /// Someone awaits several passes together.
    pub fn expect_many(&mut self, ExpectPasses { passes, reply }: ExpectPasses) {
        let batch = Rc::new(RefCell::new(Batch {
            ends: passes.iter().map(|pass| missing(*pass)).collect(),
            missing: passes.len(),
            reply: Some(reply),
        }));
        for (index, pass) in passes.into_iter().enumerate() {
            self.put(pass, Waiter::Many(Rc::clone(&batch), index));
        }
    }

    fn put(&mut self, pass: PassId, waiter: Waiter) {
        let place = pass.slot as usize;
        if place >= self.places.len() {
            self.places.resize_with(place + 1, Vec::new);
        }
        self.places[place].push((pass.generation, waiter));
    }

    fn take(&mut self, pass: PassId) -> Option<Waiter> {
        let place = self.places.get_mut(pass.slot as usize)?;
        let at = place.iter().position(|(generation, _)| *generation == pass.generation)?;
        Some(place.swap_remove(at).1)
    }

    /// A pass has ended. Whether someone awaited it.
    pub fn ended(&mut self, end: Completion<'static>) -> bool {
        match self.take(end.pass) {
            None => false,
            Some(Waiter::One(reply)) => {
                // Whoever asked may have given up.
                drop(reply.send(end));
                true
            }
            Some(Waiter::Many(batch, index)) => {
                let mut batch = batch.borrow_mut();
                batch.ends[index] = end;
                batch.missing -= 1;
                if batch.missing == 0
                    && let Some(reply) = batch.reply.take()
                {
                    // Whoever asked may have given up.
                    drop(reply.send(std::mem::take(&mut batch.ends)));
                }
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(slot: u32, generation: u64) -> PassId {
        PassId { slot, generation }
    }

    fn end(pass: PassId) -> Completion<'static> {
        Completion { pass, tag: 7, attempt: 0, outcome: PassOutcome::Poisoned }
    }

    #[test]
    fn a_batch_is_answered_once_in_its_own_order() {
        let mut awaits = PassAwaits::default();
        let (reply, mut answer) = oneshot::channel();
        let passes = vec![pass(5, 1), pass(0, 3), pass(2, 9)];
        awaits.expect_many(ExpectPasses { passes: passes.clone(), reply });
        for of in [2, 0] {
            assert!(awaits.ended(end(passes[of])));
            assert!(answer.try_recv().is_err());
        }
        assert!(awaits.ended(end(passes[1])));
        let told: Vec<_> = passes.iter().map(|pass| end(*pass)).collect();
        assert_eq!(answer.try_recv().unwrap(), told);
        assert!(!awaits.ended(end(passes[1])));
    }

    #[test]
    fn an_end_of_another_pass_of_the_slot_answers_nobody() {
        let mut awaits = PassAwaits::default();
        let (reply, mut answer) = oneshot::channel();
        awaits.expect_one(ExpectPass { pass: pass(1, 2), reply });
        assert!(!awaits.ended(end(pass(1, 1))));
        assert!(answer.try_recv().is_err());
        assert!(awaits.ended(end(pass(1, 2))));
        assert_eq!(answer.try_recv().unwrap().pass, pass(1, 2));
    }

    /// The client frees a slot before it tells of the end.
    #[test]
    fn the_next_pass_of_a_slot_may_be_expected_before_the_end_of_the_last_is_told() {
        let mut awaits = PassAwaits::default();
        let (reply, mut first) = oneshot::channel();
        awaits.expect_one(ExpectPass { pass: pass(1, 1), reply });
        let (reply, mut second) = oneshot::channel();
        awaits.expect_one(ExpectPass { pass: pass(1, 2), reply });
        assert!(awaits.ended(end(pass(1, 1))));
        assert_eq!(first.try_recv().unwrap().pass, pass(1, 1));
        assert!(awaits.ended(end(pass(1, 2))));
        assert_eq!(second.try_recv().unwrap().pass, pass(1, 2));
    }
}
