//! The local deque: what a node holds claimed and has not started.
//!
//! [`Deque`] is the order alone. [`Dispatcher`] is the rules around it: what is inserted already
//! claimed, who runs next, what is offered to a thief and what becomes of it, and when the node
//! asks for more. A claim is in exactly one place: in the deque, in transit to a thief, handed to an
//! executor, or forgotten because somebody else has it.

mod dispatcher;
#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod interleavings;
mod order;

pub use dispatcher::{
    DequeConfig, DequeCounters, Dispatcher, Effect, InsertOutcome, OfferPlan, Plan, Source,
};
pub use order::{Deque, Entry};
