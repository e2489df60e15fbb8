//! What goes into each datagram, and in which order.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use crate::id::{Generation, NodeId};
use crate::load::{Load, LoadReport, LoadTable};
use crate::swim::dissemination::Queue;
use crate::swim::{Member, MemberState};
use crate::time::Instant;
use crate::wire::datagram::{Body, Sender, Writer};

/// A load older than this is not passed on: the work that it speaks of is done or was stolen.
const LOAD_AGE_MAX: Duration = Duration::from_secs(10);

/// Members whose loads are looked up for one datagram, whether or not there is one to pass on.
const LOADS_LOOKED_AT_MAX: usize = 64;

/// What datagrams are made of: this node's record and load, news, and the loads of others.
#[derive(Debug)]
pub(super) struct Composer {
    pub(super) me: Member,
    pub(super) load: Option<Load>,
    pub(super) loads: LoadTable,
    pub(super) queue: Queue,
    load_cursor: Option<NodeId>,
}

/// One datagram to be written.
#[derive(Debug)]
pub(super) struct Letter<'a> {
    pub(super) receiver: &'a NodeId,
    /// The boot that is spoken to, where it has said so.
    pub(super) receiver_generation: Option<Generation>,
    pub(super) body: Body,
    pub(super) news: News,
}

/// How much a datagram carries beside its body and the records of the two who speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    All,
    None,
}

impl Composer {
    pub(super) fn new(me: Member) -> Self {
        let (loads, queue) = (LoadTable::default(), Queue::default());
        Self { me, load: None, loads, queue, load_cursor: None }
    }

    /// Writes a datagram: first the receiver's own record if it should refute or obey it, then this
    /// node's record, so that who is spoken to always knows who speaks, then news, each sent at most
    /// `limit` times, then loads. This node's load has its bytes reserved.
    pub(super) fn compose(
        &mut self,
        now: Instant,
        letter: Letter<'_>,
        limit: u32,
        peers: &BTreeMap<NodeId, Member>,
    ) -> Vec<u8> {
        let (node, generation) = (self.me.id.clone(), self.me.generation);
        let mut writer = Writer::new(Sender { node: node.clone(), generation }, letter.body);
        if let Some(record) = peers.get(letter.receiver) {
            let outlived = letter.receiver_generation.is_some_and(|g| g < record.generation);
            if record.state != MemberState::Alive || outlived {
                writer.update(record);
            }
        }
        writer.update(&self.me);
        if letter.news == News::All {
            if let Some(load) = self.load {
                writer.load(&LoadReport { node, generation, load, age_ms: 0 });
            }
            self.queue.fill(&mut writer, Some(letter.receiver), limit);
            self.pass_on_loads(now, letter.receiver, peers, &mut writer);
        }
        writer.finish()
    }

    /// Adds loads of others while there is room, going on where the last datagram stopped.
    fn pass_on_loads(
        &mut self,
        now: Instant,
        receiver: &NodeId,
        peers: &BTreeMap<NodeId, Member>,
        writer: &mut Writer,
    ) {
        let start = self.load_cursor.clone();
        let after = start.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let late = peers.range::<NodeId, _>((after, Bound::Unbounded));
        let early = start.as_ref().map(|start| peers.range(..=start)).into_iter().flatten();
        for id in late.chain(early).map(|(id, _)| id).take(LOADS_LOOKED_AT_MAX) {
            let report = self.loads.report_of(now, id).filter(|_| id != receiver);
            let fresh = report.filter(|r| Duration::from_millis(r.age_ms.into()) < LOAD_AGE_MAX);
            if fresh.is_some_and(|report| !writer.load(&report)) {
                return;
            }
            self.load_cursor = Some(id.clone());
        }
    }
}
