//! The member table: the greatest record of each id, and what a change of it means to subscribers.
//!
//! Invariants: a record gives way only to one of greater precedence; each event's epoch is one
//! greater than the one before; the snapshot is what the events add up to; at most [`MEMBERS_MAX`]
//! records are held, and only tombstones give way when it is full, the oldest first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::NodeId;
use crate::limits::MEMBERS_MAX;
use crate::swim::{Member, MemberState, MembershipEvent};
use crate::time::Instant;

#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: BTreeMap<NodeId, Row>,
    /// Dead and departed members by the time they became so.
    tombstones: BTreeSet<(Instant, NodeId)>,
    epoch: u64,
}

#[derive(Debug)]
struct Row {
    member: Member,
    since: Instant,
}

/// What putting a record did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Put {
    /// What subscribers are told, if it concerns them.
    pub(crate) event: Option<MembershipEvent>,
    /// The tombstone that gave way.
    pub(crate) evicted: Option<NodeId>,
}

/// Why a record was not put: every row is of a present member.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl Table {
    pub(crate) fn get(&self, id: &NodeId) -> Option<&Member> {
        self.rows.get(id).map(|row| &row.member)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.rows.values().map(|row| &row.member)
    }

    pub(crate) fn present(&self) -> impl Iterator<Item = &Member> {
        self.iter().filter(|member| member.is_present())
    }

    pub(crate) fn snapshot(&self) -> MembershipEvent {
        MembershipEvent::Snapshot {
            epoch: self.epoch,
            members: self.present().cloned().collect::<Vec<_>>().into(),
        }
    }

    /// Puts a record in the place of the one that is known. The caller has compared the two.
    pub(crate) fn put(&mut self, now: Instant, member: Member) -> Result<Put, Full> {
        let old = self.rows.get(&member.id);
        let evicted = if old.is_none() && self.rows.len() >= MEMBERS_MAX {
            Some(self.evict_oldest().ok_or(Full)?)
        } else {
            None
        };
        let old = self.rows.get(&member.id).map(|row| (row.member.clone(), row.since));
        let was_tombstone = old.as_ref().filter(|(m, _)| !m.is_present()).map(|(_, since)| *since);
        let since = match was_tombstone {
            Some(since) if !member.is_present() => since,
            _ => now,
        };
        if let Some(since) = was_tombstone {
            self.tombstones.remove(&(since, member.id.clone()));
        }
        if !member.is_present() {
            self.tombstones.insert((since, member.id.clone()));
        }
        let event = self.event(old.map(|(m, _)| m), &member);
        self.rows.insert(member.id.clone(), Row { member, since });
        Ok(Put { event, evicted })
    }

    /// Numbers the change and names it; `None` for one that subscribers do not see.
    fn event(&mut self, old: Option<Member>, new: &Member) -> Option<MembershipEvent> {
        use MemberState::{Alive, Dead, Left, Suspect};
        let (epoch, member) = (self.epoch + 1, new.clone());
        let old = old.filter(Member::is_present);
        let event = match (&old, new.state) {
            (None, Alive | Suspect) => MembershipEvent::Joined { epoch, member },
            (None, Dead | Left) => return None,
            (Some(_), Dead) => MembershipEvent::Died { epoch, member },
            (Some(_), Left) => MembershipEvent::Left { epoch, member },
            (Some(old), _) if (old.boot(), old.steal) != (new.boot(), new.steal) => {
                MembershipEvent::Updated { epoch, member }
            }
            (Some(old), Suspect) if old.state == Alive => {
                MembershipEvent::Suspected { epoch, member }
            }
            (Some(old), Alive) if old.state == Suspect => {
                MembershipEvent::Recovered { epoch, member }
            }
            (Some(_), Alive | Suspect) => return None,
        };
        self.epoch = epoch;
        Some(event)
    }

    fn evict_oldest(&mut self) -> Option<NodeId> {
        let (_, id) = self.tombstones.pop_first()?;
        self.rows.remove(&id);
        Some(id)
    }

    /// Drops a tombstone that is older than `retention`.
    pub(crate) fn pop_expired(&mut self, now: Instant, retention: Duration) -> Option<NodeId> {
        let oldest = self.tombstones.first().map(|(since, _)| *since)?;
        if now.saturating_since(oldest) < retention { None } else { self.evict_oldest() }
    }

    /// When the oldest tombstone has been kept for `retention`.
    pub(crate) fn next_expiry(&self, retention: Duration) -> Option<Instant> {
        self.tombstones.first().map(|(since, _)| *since + retention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Generation, Incarnation};

    fn member(name: &str, generation: u64, incarnation: u32, state: MemberState) -> Member {
        Member {
            id: NodeId::new(name).unwrap(),
            generation: Generation(generation),
            incarnation: Incarnation(incarnation),
            state,
            gossip: "127.0.0.1:1".parse().unwrap(),
            steal: "127.0.0.1:2".parse().unwrap(),
        }
    }

    #[test]
    fn each_change_has_its_event_and_epochs_grow_by_one() {
        use MemberState::{Alive, Dead, Left, Suspect};
        use MembershipEvent as E;
        let mut table = Table::default();
        let steps = [
            (member("a", 1, 0, Alive), "joined"),
            (member("a", 1, 0, Suspect), "suspected"),
            (member("a", 1, 1, Alive), "recovered"),
            (member("a", 1, 2, Alive), ""),
            (member("a", 2, 0, Suspect), "updated"),
            (member("a", 2, 0, Dead), "died"),
            (member("a", 2, 0, Left), ""),
            (member("a", 3, 0, Alive), "joined"),
            (member("a", 3, 0, Left), "left"),
            (member("b", 1, 0, Dead), ""),
            (member("b", 1, 1, Suspect), "joined"),
        ];
        let mut epochs = Vec::new();
        for (record, name) in steps {
            let event = table.put(Instant::ZERO, record.clone()).unwrap().event;
            let seen = match &event {
                None => "",
                Some(E::Joined { .. }) => "joined",
                Some(E::Updated { .. }) => "updated",
                Some(E::Suspected { .. }) => "suspected",
                Some(E::Recovered { .. }) => "recovered",
                Some(E::Died { .. }) => "died",
                Some(E::Left { .. }) => "left",
                Some(E::Snapshot { .. }) => "snapshot",
            };
            assert_eq!(seen, name, "{record:?}");
            assert!(event.as_ref().is_none_or(|e| e.member() == Some(&record)));
            epochs.extend(event.map(|e| e.epoch()));
        }
        assert_eq!(epochs, (1..=8).collect::<Vec<_>>());
        let E::Snapshot { epoch, members } = table.snapshot() else { panic!("a snapshot") };
        assert_eq!((epoch, &*members), (8, &[member("b", 1, 1, Suspect)][..]));
    }

    #[test]
    fn a_full_table_drops_its_oldest_tombstone_and_never_a_present_member() {
        let mut table = Table::default();
        for i in 0..MEMBERS_MAX as u64 {
            let state = if i % 2 == 0 { MemberState::Dead } else { MemberState::Alive };
            let now = Instant::from_micros(MEMBERS_MAX as u64 - i);
            table.put(now, member(&format!("n{i}"), 1, 0, state)).unwrap();
        }
        let now = Instant::from_micros(1_000_000);
        let put = table.put(now, member("new", 1, 0, MemberState::Alive)).unwrap();
        let oldest = NodeId::new(format!("n{}", MEMBERS_MAX - 2)).unwrap();
        assert_eq!(put.evicted, Some(oldest));
        while table.pop_expired(now, Duration::ZERO).is_some() {}
        for i in 0..MEMBERS_MAX / 2 - 1 {
            table.put(now, member(&format!("m{i}"), 1, 0, MemberState::Alive)).unwrap();
        }
        assert_eq!(table.put(now, member("late", 1, 0, MemberState::Alive)), Err(Full));
    }

    #[test]
    fn a_tombstone_keeps_its_age_when_its_record_grows() {
        let mut table = Table::default();
        let hour = Duration::from_secs(3_600);
        table.put(Instant::ZERO, member("a", 1, 0, MemberState::Dead)).unwrap();
        table.put(Instant::ZERO + hour, member("a", 2, 0, MemberState::Dead)).unwrap();
        assert_eq!(table.next_expiry(6 * hour), Some(Instant::ZERO + 6 * hour));
        assert_eq!(table.pop_expired(Instant::ZERO + 6 * hour - hour, 6 * hour), None);
        assert_eq!(
            table.pop_expired(Instant::ZERO + 6 * hour, 6 * hour),
            Some(NodeId::new("a").unwrap())
        );
        assert_eq!(table.next_expiry(hour), None);
    }
}
