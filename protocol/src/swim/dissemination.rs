//! News of members on their way: which go into the next datagram, and how often each is sent.
//!
//! Deaths and departures go before all else, then the news sent least often, then the newest. A
//! third of each datagram is kept for news of the living, so that a mass death cannot delay a
//! refutation.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::id::NodeId;
use crate::swim::Member;
use crate::wire::codec;
use crate::wire::datagram::Writer;

/// Records that do not fit after which a datagram counts as full.
const MISFITS_MAX: usize = 4;

/// How often one update is sent in a mesh of `members`: `multiplier x log2(members + 1)`.
pub fn send_limit(multiplier: u32, members: usize) -> u32 {
    (f64::from(multiplier) * (members as f64 + 1.0).log2()).ceil() as u32
}

/// The updates still to be sent, one a member: a newer record takes the place of an older.
#[derive(Debug, Default)]
pub struct Queue {
    items: BTreeMap<NodeId, Item>,
    order: BTreeSet<Rank>,
    stamp: u64,
}

#[derive(Debug)]
struct Item {
    member: Member,
    rank: Rank,
}

/// The order in which updates go out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: Class,
    sends: u32,
    stamp: Reverse<u64>,
    id: NodeId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Gone,
    Present,
}

impl Queue {
    /// Takes in news, in place of older news of the same member.
    pub fn push(&mut self, member: Member) {
        self.forget(&member.id);
        self.stamp += 1;
        let class = if member.is_present() { Class::Present } else { Class::Gone };
        let id = member.id.clone();
        let rank = Rank { class, sends: 0, stamp: Reverse(self.stamp), id: id.clone() };
        self.order.insert(rank.clone());
        self.items.insert(id, Item { member, rank });
    }

    /// Drops what is queued about `id`.
    pub fn forget(&mut self, id: &NodeId) {
        if let Some(old) = self.items.remove(id) {
            self.order.remove(&old.rank);
        }
    }

    /// How many updates are queued.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Fills `writer`, leaving out news of the receiver itself. Each update that goes in counts as
    /// sent once; after `limit` times it is dropped.
    pub fn fill(&mut self, writer: &mut Writer, receiver: Option<&NodeId>, limit: u32) {
        let reserved = writer.left() / 3;
        let mut sent = Vec::new();
        self.pick(writer, receiver, Class::Gone, reserved, &mut sent);
        self.pick(writer, receiver, Class::Present, 0, &mut sent);
        self.pick(writer, receiver, Class::Gone, 0, &mut sent);
        for rank in sent {
            self.order.remove(&rank);
            let rank = Rank { sends: rank.sends + 1, ..rank };
            if rank.sends >= limit {
                self.items.remove(&rank.id);
            } else if let Some(item) = self.items.get_mut(&rank.id) {
                item.rank = rank.clone();
                self.order.insert(rank);
            }
        }
    }

    /// Writes what fits of one class without touching the last `reserved` bytes.
    fn pick(
        &self,
        writer: &mut Writer,
        receiver: Option<&NodeId>,
        class: Class,
        reserved: usize,
        sent: &mut Vec<Rank>,
    ) {
        let mut misfits = 0;
        for rank in self.order.iter().filter(|r| r.class == class) {
            if Some(&rank.id) == receiver || sent.contains(rank) {
                continue;
            }
            let member = &self.items[&rank.id].member;
            let fits = codec::encoded_len(member) + reserved <= writer.left();
            if fits && writer.update(member) {
                sent.push(rank.clone());
            } else {
                misfits += 1;
                if misfits == MISFITS_MAX {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Generation, Incarnation};
    use crate::limits::{DATAGRAM_BODY_BYTES_MAX, DATAGRAM_DECODE_BYTES_MAX, NAME_BYTES_MAX};
    use crate::swim::MemberState;
    use crate::wire::datagram::{Body, Datagram, Sender};

    fn member(name: &str, state: MemberState) -> Member {
        Member {
            id: NodeId::new(name).unwrap(),
            generation: Generation(1),
            incarnation: Incarnation(0),
            state,
            gossip: "127.0.0.1:1".parse().unwrap(),
            steal: "127.0.0.1:2".parse().unwrap(),
        }
    }

    fn datagram(queue: &mut Queue, receiver: Option<&str>, limit: u32) -> (usize, Vec<String>) {
        let node = NodeId::new("me").unwrap();
        let mut writer =
            Writer::new(Sender { node, generation: Generation(1) }, Body::Ack { seq: 1 });
        let receiver = receiver.map(|r| NodeId::new(r).unwrap());
        queue.fill(&mut writer, receiver.as_ref(), limit);
        let bytes = writer.finish();
        let datagram: Datagram = codec::decode::<_, DATAGRAM_DECODE_BYTES_MAX>(&bytes).unwrap();
        (bytes.len(), datagram.updates.iter().map(|m| m.id.to_string()).collect())
    }

    #[test]
    fn deaths_first_then_least_sent_then_newest() {
        let mut queue = Queue::default();
        queue.push(member("alive-1", MemberState::Alive));
        assert_eq!(datagram(&mut queue, None, 9).1, ["alive-1"]);
        queue.push(member("alive-2", MemberState::Alive));
        queue.push(member("suspect", MemberState::Suspect));
        queue.push(member("dead", MemberState::Dead));
        queue.push(member("left", MemberState::Left));
        assert_eq!(
            datagram(&mut queue, None, 9).1,
            ["left", "dead", "suspect", "alive-2", "alive-1"]
        );
    }

    #[test]
    fn an_update_is_sent_as_often_as_the_limit_says_and_never_to_its_own_subject() {
        let mut queue = Queue::default();
        queue.push(member("a", MemberState::Alive));
        assert_eq!(datagram(&mut queue, Some("a"), 3).1, [""; 0]);
        assert_eq!(datagram(&mut queue, Some("b"), 3).1, ["a"]);
        assert_eq!(datagram(&mut queue, Some("b"), 3).1, ["a"]);
        assert_eq!(datagram(&mut queue, Some("b"), 3).1, ["a"]);
        assert_eq!(datagram(&mut queue, Some("b"), 3).1, [""; 0]);
        assert!(queue.is_empty());
        assert_eq!([send_limit(4, 1), send_limit(4, 7), send_limit(4, 64)], [4, 12, 25]);
    }

    #[test]
    fn a_newer_record_takes_the_place_of_the_older() {
        let mut queue = Queue::default();
        queue.push(member("a", MemberState::Alive));
        queue.push(member("a", MemberState::Dead));
        assert_eq!(queue.len(), 1);
        assert_eq!(datagram(&mut queue, None, 1).1, ["a"]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_mass_death_leaves_room_for_the_living_and_every_datagram_fits() {
        let mut queue = Queue::default();
        let long = |i: usize| format!("{i:0>width$}", width = NAME_BYTES_MAX);
        for i in 0..100 {
            queue.push(member(&long(i), MemberState::Dead));
        }
        queue.push(member("refuter", MemberState::Alive));
        let (bytes, names) = datagram(&mut queue, None, 9);
        assert!(names.contains(&"refuter".to_string()));
        assert!(bytes <= DATAGRAM_BODY_BYTES_MAX);
        assert!(bytes + crate::limits::MEMBER_BYTES_MAX > DATAGRAM_BODY_BYTES_MAX, "and is full");
    }
}
