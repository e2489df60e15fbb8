//! `HeartbeatWriter`: makes the rows of this process beat in the heartbeat table.
//!
//! Owns nothing but its timer. On death the node stops; its rows stand still, are looked at, and
//! found alive by their locks.
//!
//! It runs apart from the workers, so a pass that takes a second, or a day, stops no heart.

use actix::prelude::*;
use meshwork_protocol::limits::PASS_BEAT_EVERY;

use super::reclaimer::Heart;

/// The actor.
pub struct HeartbeatWriter(Heart);

impl HeartbeatWriter {
    /// A writer for the rows of this host.
    pub fn new(heart: Heart) -> Self {
        Self(heart)
    }
}

impl Actor for HeartbeatWriter {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.0.beat();
        ctx.run_interval(PASS_BEAT_EVERY, |writer, _| writer.0.beat());
    }
}
