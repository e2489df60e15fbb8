//! One host and the node on it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use crate::id::{Generation, NodeId};
use crate::load::Load;
use crate::sim::machines::{Input, Machines};
use crate::swim::{Member, MemberState, MembershipEvent};
use crate::time::Instant;

/// How a host ended by its own will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A newer boot of its name lives.
    Fenced(Generation),
    /// Its name was taken.
    Refused(SocketAddr),
}

/// One host and the node on it.
#[derive(Debug)]
pub struct Host {
    /// The node's name.
    pub id: NodeId,
    /// Where it takes datagrams and streams.
    pub addr: SocketAddr,
    /// What it joins by.
    pub seeds: Vec<String>,
    /// Its machines; none while it is down.
    pub machines: Option<Machines>,
    /// How it ended, if by its own will.
    pub end: Option<End>,
    /// Whether this boot was ever paused or cut off.
    pub disturbed: bool,
    /// Whether this boot was told to leave.
    pub leaving: bool,
    /// Every membership event of every boot.
    pub events: Vec<(Instant, MembershipEvent)>,
    /// Seeds that it reported as down.
    pub seeds_down: Vec<String>,
    /// Counts its boots.
    pub boot: u64,
    /// What its clock shows at the world's origin: no two clocks agree.
    pub(super) clock: Duration,
    pub(super) paused: bool,
    pub(super) backlog: VecDeque<Input>,
    /// When its timers are looked at next, and by which event.
    pub(super) wake: Option<(Instant, u64)>,
    pub(super) mailbox_free: Instant,
}

impl Host {
    /// This node's record of itself.
    ///
    /// # Panics
    /// When the host is down.
    pub fn me(&self) -> &Member {
        self.members().me()
    }

    /// The node's membership.
    ///
    /// # Panics
    /// When the host is down.
    pub fn members(&self) -> &crate::swim::Members {
        self.machines.as_ref().expect("the host is up").swim.members()
    }

    /// The newest load of `id` that this node knows, and its age at `now`, a time of the world.
    pub fn load_of(&self, now: Instant, id: &NodeId) -> Option<(Load, Duration)> {
        self.members().loads().load_of(now + self.clock, id)
    }

    /// What this node thinks of `id`.
    pub fn state_of(&self, id: &NodeId) -> Option<MemberState> {
        let machines = self.machines.as_ref()?;
        machines.swim.members().table().find(|m| m.id == *id).map(|m| m.state)
    }
}

impl Host {
    pub(super) fn new(id: NodeId, addr: SocketAddr, seeds: Vec<String>) -> Self {
        Self {
            id,
            addr,
            seeds,
            machines: None,
            end: None,
            disturbed: false,
            leaving: false,
            events: Vec::new(),
            seeds_down: Vec::new(),
            boot: 0,
            clock: Duration::ZERO,
            paused: false,
            backlog: VecDeque::new(),
            wake: None,
            mailbox_free: Instant::ZERO,
        }
    }
}
