//! Stealing: how idle nodes get the work of busy ones.
//!
//! [`Thief`] chooses whom to ask ([`victim`]), takes what it is offered in the store, and tells the
//! victim which jobs it got. On the victim's side, [`InTransit`] keeps what was offered until that is
//! settled or retaken, [`Lifelines`] remembers who asked in vain, and [`RateLimit`] bounds how often
//! one peer may ask. A claim moves by one compare-and-set in the store: whatever message is lost, a
//! job has one owner, and one of the two sides finds out.

mod handoff;
mod lifeline;
#[cfg(test)]
mod parties;
mod peers;
mod rate_limit;
mod thief;
mod transfer;
pub mod victim;

pub(crate) use handoff::offer_frame;
pub use handoff::{InTransit, Settled};
pub use lifeline::{Lifelines, lifelines_of};
pub use rate_limit::RateLimit;
pub use thief::{AskError, Effect, StealConfig, StealCounters, Thief};
pub use transfer::{Moved, TransferError};
