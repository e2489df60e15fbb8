//! Subscribers to membership events: a snapshot first, then events in order.
//!
//! A subscriber that cannot keep up is passed over, and gets one fresh snapshot when it has room
//! again; it never slows the sender, and nothing is buffered for it here.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use meshwork_protocol::swim::{Member, MembershipEvent};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

/// How often a subscriber that fell behind is tried again.
pub const RETRY: Duration = Duration::from_millis(20);

/// A membership event as an actor's message.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct MembershipChanged(pub MembershipEvent);

/// Where one subscriber's events go.
pub enum Sink {
    /// To an actor's mailbox, whose capacity is the subscriber's buffer.
    Actor(Recipient<MembershipChanged>),
    /// To a bounded channel.
    Channel(mpsc::Sender<MembershipEvent>),
}

enum Offered {
    Taken,
    Full,
    Gone,
}

impl Sink {
    fn offer(&self, event: MembershipEvent) -> Offered {
        match self {
            Self::Actor(recipient) => match recipient.try_send(MembershipChanged(event)) {
                Ok(()) => Offered::Taken,
                Err(SendError::Full(_)) => Offered::Full,
                Err(SendError::Closed(_)) => Offered::Gone,
            },
            Self::Channel(sender) => match sender.try_send(event) {
                Ok(()) => Offered::Taken,
                Err(TrySendError::Full(_)) => Offered::Full,
                Err(TrySendError::Closed(_)) => Offered::Gone,
            },
        }
    }

    fn is_gone(&self) -> bool {
        match self {
            Self::Actor(recipient) => !recipient.connected(),
            Self::Channel(sender) => sender.is_closed(),
        }
    }
}

/// All subscribers.
#[derive(Default)]
pub struct Subscribers {
    rows: Vec<Row>,
}

struct Row {
    sink: Sink,
    behind: bool,
    /// The last event that it has seen, or that its snapshot includes.
    epoch: u64,
}

impl Row {
    /// Returns whether the subscriber is still there.
    fn offer(&mut self, event: MembershipEvent) -> bool {
        let epoch = event.epoch();
        match self.sink.offer(event) {
            Offered::Taken => {
                self.epoch = epoch;
                self.behind = false;
                true
            }
            Offered::Full => {
                self.behind = true;
                true
            }
            Offered::Gone => false,
        }
    }
}

impl Subscribers {
    /// Adds a subscriber; `snapshot` is its first event.
    pub fn add(&mut self, sink: Sink, snapshot: MembershipEvent) {
        self.rows.retain(|row| !row.sink.is_gone());
        let epoch = snapshot.epoch();
        match sink.offer(snapshot) {
            Offered::Gone => {}
            Offered::Taken => self.rows.push(Row { sink, behind: false, epoch }),
            Offered::Full => self.rows.push(Row { sink, behind: true, epoch }),
        }
    }

    /// Passes an event on. `snapshot` is as of this event or a later one: whoever got it has no need
    /// of the events before.
    pub fn publish(&mut self, event: &MembershipEvent, snapshot: impl Fn() -> MembershipEvent) {
        self.rows.retain_mut(|row| {
            if row.behind {
                row.offer(snapshot())
            } else if event.epoch() > row.epoch {
                row.offer(event.clone())
            } else {
                true
            }
        });
    }

    /// Tries again those that fell behind, and forgets those that are gone; returns whether any is
    /// still behind.
    pub fn retry(&mut self, snapshot: impl Fn() -> MembershipEvent) -> bool {
        self.rows.retain_mut(
            |row| {
                if row.behind { row.offer(snapshot()) } else { !row.sink.is_gone() }
            },
        );
        self.any_behind()
    }

    /// Whether any subscriber waits for a snapshot.
    pub fn any_behind(&self) -> bool {
        self.rows.iter().any(|row| row.behind)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// The member table as it was after its latest change, for anyone to read.
#[derive(Clone, Debug, Default)]
pub struct MemberTable {
    /// The number of the latest event.
    pub epoch: u64,
    /// Every record, tombstones included, by id.
    pub members: Arc<[Member]>,
}

impl MemberTable {
    /// The record of `id`.
    pub fn get(&self, id: &meshwork_protocol::id::NodeId) -> Option<&Member> {
        let at = self.members.binary_search_by(|m| m.id.cmp(id)).ok()?;
        self.members.get(at)
    }

    /// The members thought to take part.
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.is_present())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(epoch: u64) -> MembershipEvent {
        MembershipEvent::Snapshot { epoch, members: Arc::from([]) }
    }

    fn died(epoch: u64) -> MembershipEvent {
        let addr = "127.0.0.1:1".parse().unwrap();
        let member = Member {
            id: meshwork_protocol::id::NodeId::new("a").unwrap(),
            generation: Default::default(),
            incarnation: Default::default(),
            state: meshwork_protocol::swim::MemberState::Dead,
            gossip: addr,
            steal: addr,
        };
        MembershipEvent::Died { epoch, member }
    }

    #[test]
    fn one_that_falls_behind_gets_one_fresh_snapshot_and_then_events() {
        let mut subscribers = Subscribers::default();
        let (sender, mut slow) = mpsc::channel(2);
        subscribers.add(Sink::Channel(sender), snapshot(0));
        for epoch in 1..=5 {
            subscribers.publish(&died(epoch), || snapshot(epoch));
        }
        assert!(subscribers.any_behind());
        let got: Vec<_> = std::iter::from_fn(|| slow.try_recv().ok()).map(|e| e.epoch()).collect();
        assert_eq!(got, [0, 1]);
        assert!(!subscribers.retry(|| snapshot(5)));
        subscribers.publish(&died(6), || snapshot(6));
        let got: Vec<_> = std::iter::from_fn(|| slow.try_recv().ok()).collect();
        assert_eq!(got, [snapshot(5), died(6)]);
    }

    #[test]
    fn events_that_a_snapshot_includes_are_not_told_again() {
        let mut subscribers = Subscribers::default();
        let (sender, mut receiver) = mpsc::channel(8);
        // Three events came at once: the table is at the last when the first is published.
        subscribers.add(Sink::Channel(sender), snapshot(3));
        for epoch in 1..=4 {
            subscribers.publish(&died(epoch), || snapshot(4));
        }
        let got: Vec<_> = std::iter::from_fn(|| receiver.try_recv().ok()).collect();
        assert_eq!(got, [snapshot(3), died(4)]);
    }

    #[test]
    fn one_that_is_gone_is_forgotten() {
        let mut subscribers = Subscribers::default();
        let (sender, receiver) = mpsc::channel(2);
        subscribers.add(Sink::Channel(sender), snapshot(0));
        drop(receiver);
        assert_eq!(subscribers.len(), 1);
        subscribers.publish(&died(1), || snapshot(1));
        assert!(subscribers.is_empty());
    }
}
