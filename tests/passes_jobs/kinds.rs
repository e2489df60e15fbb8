//! What the node enqueues, and its worker processes run.

use meshwork::prelude::*;
use serde::{Deserialize, Serialize};

/// Returns the square, and who computed it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Square(pub u64);

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Squared {
    pub(crate) square: u64,
    pub(crate) pid: u32,
}

impl Job for Square {
    const NAME: &'static str = "square";
    type Output = Squared;
}

/// Aborts its process in so many first attempts; returns which attempt went well.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Abort {
    pub(crate) times: u32,
}

impl Job for Abort {
    const NAME: &'static str = "abort";
    type Output = u32;
}

/// Never ends in its first attempt; then says which process ran it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hang;

impl Job for Hang {
    const NAME: &'static str = "hang";
    type Output = u32;
}

/// Panics.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Panics;

impl Job for Panics {
    const NAME: &'static str = "panics";
    type Output = ();
}

/// Fails in its first attempt with an error that asks for another, and then for good.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Fails;

impl Job for Fails {
    const NAME: &'static str = "fails";
    type Output = ();
}

/// Returns so many bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Fill {
    pub(crate) bytes: usize,
}

impl Job for Fill {
    const NAME: &'static str = "fill";
    type Output = String;
}
