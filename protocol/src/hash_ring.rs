//! The consistent hash ring: which node a key belongs to.
//!
//! Each member has `virtual_nodes` points, `xxh3_64("{id}-{i}")` for i from 0; a key belongs to the
//! first point at or after `xxh3_64(key)`, clockwise. So the same members give the same owners on
//! every node, and a change of membership moves only the keys of the member that came or went.
//!
//! A [`HashRing`] is a value that never changes: whoever routes holds a snapshot, and a join or a
//! death makes a new one. Equal members with equally many points make equal rings, whatever the
//! order in which they came.
//!
//! The points lie in flat arrays, sorted, under an index by the high bits of a hash, so that a lookup
//! reads a point or two. A change copies the arrays in the long runs between the points that come or
//! go, and corrects the index by as many of them as lie before: it neither sorts nor counts again, and
//! costs about as much as the copy. Only where the index doubles or halves is it counted anew.
//!
//! Source: Karger et al., *Consistent hashing and random trees* (STOC 1997).

use std::io::Write as _;

use xxhash_rust::xxh3::xxh3_64;

use crate::id::NodeId;
use crate::limits::{MEMBERS_MAX, VIRTUAL_NODES_MAX};
use crate::swim::MembershipEvent;

/// Points of a member on the hash ring, unless configured otherwise.
pub const VIRTUAL_NODES: u32 = 150;

/// A member's place in the list of members, which is sorted by id: where points of two members
/// coincide, the order of their numbers is the order of their ids.
type MemberIndex = u16;

const _: () = assert!(MEMBERS_MAX <= MemberIndex::MAX as usize);
const _: () = assert!(
    (MemberIndex::MAX as u64) * (VIRTUAL_NODES_MAX as u64) < u32::MAX as u64,
    "points are numbered in 32 bits"
);

/// The members and their points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashRing {
    virtual_nodes: u32,
    members: Vec<NodeId>,
    points: Points,
}

/// Points by hash, then by member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Points {
    hashes: Vec<u64>,
    owners: Vec<MemberIndex>,
    /// For each value of a hash's high bits, how many points have a smaller one: a search starts
    /// there, and as there are at least as many values as points, it is about done.
    first: Vec<u32>,
    /// Right shift of a hash that leaves those high bits.
    shift: u32,
}

impl HashRing {
    /// A hash ring without members, on which each will have `virtual_nodes` points (1 to
    /// [`VIRTUAL_NODES_MAX`]; what is outside is taken for the nearer end). More spread the keys more
    /// evenly and cost memory.
    pub fn new(virtual_nodes: u32) -> Self {
        Self::from_members([], virtual_nodes)
    }

    /// The hash ring of these members; one that is named twice counts once.
    ///
    /// # Panics
    /// When there are more than 65,535; a member table never holds as many.
    pub fn from_members(ids: impl IntoIterator<Item = NodeId>, virtual_nodes: u32) -> Self {
        let virtual_nodes = virtual_nodes.clamp(1, VIRTUAL_NODES_MAX);
        let mut members: Vec<NodeId> = ids.into_iter().collect();
        members.sort_unstable();
        members.dedup();
        let mut all = Vec::with_capacity(members.len() * virtual_nodes as usize);
        for (i, id) in members.iter().enumerate() {
            let owner = member_index(i);
            all.extend(hashes_of(id, virtual_nodes).into_iter().map(|hash| (hash, owner)));
        }
        all.sort_unstable();
        let (hashes, owners) = all.into_iter().unzip();
        Self { virtual_nodes, members, points: Points::new(hashes, owners) }
    }

    /// This hash ring with `id` on it.
    ///
    /// # Panics
    /// As [`HashRing::from_members`].
    #[must_use]
    pub fn with_member(&self, id: &NodeId) -> Self {
        let Err(at) = self.members.binary_search(id) else { return self.clone() };
        let mut members = Vec::with_capacity(self.members.len() + 1);
        members.extend_from_slice(&self.members[..at]);
        members.push(id.clone());
        members.extend_from_slice(&self.members[at..]);
        member_index(members.len() - 1);

        let own = hashes_of(id, self.virtual_nodes);
        let points = self.points.with(&own, member_index(at));
        Self { virtual_nodes: self.virtual_nodes, members, points }
    }

    /// This hash ring without `id`.
    #[must_use]
    pub fn without_member(&self, id: &NodeId) -> Self {
        let Ok(at) = self.members.binary_search(id) else { return self.clone() };
        let mut members = Vec::with_capacity(self.members.len() - 1);
        members.extend_from_slice(&self.members[..at]);
        members.extend_from_slice(&self.members[at + 1..]);

        let own = hashes_of(id, self.virtual_nodes);
        let points = self.points.without(&own, member_index(at));
        Self { virtual_nodes: self.virtual_nodes, members, points }
    }

    /// This hash ring after `event`; none when the members on it stay the same. Only who comes or
    /// goes moves keys: a suspect keeps its own, and neither an address nor a generation is part of
    /// the hash ring.
    ///
    /// # Panics
    /// As [`HashRing::from_members`].
    pub fn apply(&self, event: &MembershipEvent) -> Option<Self> {
        match event {
            MembershipEvent::Snapshot { members, .. } => {
                let ids = members.iter().map(|member| &member.id);
                let same = ids.clone().eq(&self.members);
                (!same).then(|| Self::from_members(ids.cloned(), self.virtual_nodes))
            }
            MembershipEvent::Joined { member, .. } => {
                (!self.contains(&member.id)).then(|| self.with_member(&member.id))
            }
            MembershipEvent::Died { member, .. } | MembershipEvent::Left { member, .. } => {
                self.contains(&member.id).then(|| self.without_member(&member.id))
            }
            MembershipEvent::Updated { .. }
            | MembershipEvent::Suspected { .. }
            | MembershipEvent::Recovered { .. } => None,
        }
    }

    /// The owner of `key`; none when there are no members.
    #[inline]
    pub fn owner_of(&self, key: &str) -> Option<&NodeId> {
        self.owner_of_hash(xxh3_64(key.as_bytes()))
    }

    /// The owner of a key by its hash, `xxh3_64(key)`.
    #[inline]
    pub fn owner_of_hash(&self, hash: u64) -> Option<&NodeId> {
        let owners = &self.points.owners;
        let owner = owners.get(self.points.at_or_after(hash)).or(owners.first())?;
        Some(&self.members[usize::from(*owner)])
    }

    /// Up to `n` different members in the order in which they would own `key` if those before them
    /// were gone.
    pub fn successors(&self, key: &str, n: usize) -> Vec<&NodeId> {
        let n = n.min(self.members.len());
        let mut seen = vec![false; self.members.len()];
        let mut found = Vec::with_capacity(n);
        let start = self.points.at_or_after(xxh3_64(key.as_bytes()));
        let (before, after) = self.points.owners.split_at(start);
        for &owner in after.iter().chain(before) {
            if found.len() == n {
                break;
            }
            let owner = usize::from(owner);
            if !std::mem::replace(&mut seen[owner], true) {
                found.push(&self.members[owner]);
            }
        }
        found
    }

    /// The members, by id.
    pub fn members(&self) -> &[NodeId] {
        &self.members
    }

    /// Whether `id` is on it.
    pub fn contains(&self, id: &NodeId) -> bool {
        self.members.binary_search(id).is_ok()
    }

    /// How many members there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Points of each member.
    pub fn virtual_nodes(&self) -> u32 {
        self.virtual_nodes
    }
}

impl Points {
    fn new(hashes: Vec<u64>, owners: Vec<MemberIndex>) -> Self {
        let shift = index_shift(hashes.len());
        let first = index(&hashes, shift);
        Self { hashes, owners, first, shift }
    }

    /// The place of the first point at or after `hash`; the number of points if none is.
    #[inline]
    fn at_or_after(&self, hash: u64) -> usize {
        let mut at = self.first[(hash >> self.shift) as usize] as usize;
        while self.hashes.get(at).is_some_and(|&point| point < hash) {
            at += 1;
        }
        at
    }

    /// Where a point (`hash`, `owner`) is or belongs.
    fn place_of(&self, hash: u64, owner: MemberIndex) -> usize {
        let mut at = self.at_or_after(hash);
        while self.hashes.get(at) == Some(&hash) && self.owners[at] < owner {
            at += 1;
        }
        at
    }

    /// These points and those, `own`, of a member that becomes number `owner`.
    fn with(&self, own: &[u64], owner: MemberIndex) -> Self {
        let total = self.hashes.len() + own.len();
        let mut hashes = Vec::with_capacity(total);
        let mut owners = Vec::with_capacity(total);
        let renumber = |&o: &MemberIndex| o + MemberIndex::from(o >= owner);
        let mut copied = 0;
        for &hash in own {
            let end = self.place_of(hash, owner);
            hashes.extend_from_slice(&self.hashes[copied..end]);
            hashes.push(hash);
            owners.extend(self.owners[copied..end].iter().map(renumber));
            owners.push(owner);
            copied = end;
        }
        hashes.extend_from_slice(&self.hashes[copied..]);
        owners.extend(self.owners[copied..].iter().map(renumber));
        self.indexed(hashes, owners, own, |before, own_before| before + own_before)
    }

    /// These points without those, `own`, of member number `owner`.
    fn without(&self, own: &[u64], owner: MemberIndex) -> Self {
        let total = self.hashes.len() - own.len();
        let mut hashes = Vec::with_capacity(total);
        let mut owners = Vec::with_capacity(total);
        let renumber = |&o: &MemberIndex| o - MemberIndex::from(o > owner);
        let mut copied = 0;
        for &hash in own {
            // Of points of this member that coincide, each goes once.
            let end = self.place_of(hash, owner).max(copied);
            hashes.extend_from_slice(&self.hashes[copied..end]);
            owners.extend(self.owners[copied..end].iter().map(renumber));
            copied = end + 1;
        }
        hashes.extend_from_slice(&self.hashes[copied..]);
        owners.extend(self.owners[copied..].iter().map(renumber));
        self.indexed(hashes, owners, own, |before, own_before| before - own_before)
    }

    /// The points that these become when `own` come or go, with this index corrected by `correct`
    /// (the points before, those of `own` before), or a new one where their number asks for another
    /// size.
    fn indexed(
        &self,
        hashes: Vec<u64>,
        owners: Vec<MemberIndex>,
        own: &[u64],
        correct: impl Fn(u32, u32) -> u32,
    ) -> Self {
        if index_shift(hashes.len()) != self.shift {
            return Self::new(hashes, owners);
        }
        let mut first = Vec::with_capacity(self.first.len());
        let ends = own.iter().map(|hash| (hash >> self.shift) as usize + 1);
        for (own_before, end) in (0..).zip(ends.chain([self.first.len()])) {
            let run = &self.first[first.len()..end];
            first.extend(run.iter().map(|&before| correct(before, own_before)));
        }
        Self { hashes, owners, first, shift: self.shift }
    }
}

/// Right shift of a hash that leaves the bits that so many points are indexed by.
fn index_shift(points: usize) -> u32 {
    u64::BITS - points.next_power_of_two().ilog2().max(1)
}

/// For each value of the high bits, how many of the sorted `hashes` have a smaller one.
fn index(hashes: &[u64], shift: u32) -> Vec<u32> {
    let values = 1 << (u64::BITS - shift);
    let mut first = Vec::with_capacity(values);
    let mut points = 0;
    for hash in hashes {
        let end = (hash >> shift) as usize + 1;
        if first.len() < end {
            first.resize(end, points);
        }
        points += 1;
    }
    first.resize(values, points);
    first
}

/// The sorted hashes of a member's points.
fn hashes_of(id: &NodeId, virtual_nodes: u32) -> Vec<u64> {
    let mut name = Vec::with_capacity(id.as_str().len() + 11);
    let mut hashes: Vec<u64> = (0..virtual_nodes)
        .map(|i| {
            name.clear();
            write!(name, "{id}-{i}").expect("a vector takes every byte");
            xxh3_64(&name)
        })
        .collect();
    hashes.sort_unstable();
    hashes
}

fn member_index(i: usize) -> MemberIndex {
    MemberIndex::try_from(i).expect("a member table holds fewer than 65,536")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::id::{Generation, Incarnation};
    use crate::swim::{Member, MemberState};

    fn id(text: &str) -> NodeId {
        NodeId::new(text).unwrap()
    }

    fn workers(n: usize) -> Vec<NodeId> {
        (0..n).map(|i| id(&format!("worker-{i}"))).collect()
    }

    fn keys(n: usize) -> Vec<String> {
        (0..n).map(|i| format!("key-{i}")).collect()
    }

    fn shares(ring: &HashRing, keys: &[String]) -> BTreeMap<NodeId, usize> {
        let mut shares = BTreeMap::new();
        for key in keys {
            *shares.entry(ring.owner_of(key).unwrap().clone()).or_default() += 1;
        }
        shares
    }

    /// The same by the letter of the rule: a sorted map from points to ids, walked clockwise.
    fn owner_by_the_rule(ids: &[NodeId], virtual_nodes: u32, hash: u64) -> Option<NodeId> {
        let points: BTreeSet<(u64, &NodeId)> = ids
            .iter()
            .flat_map(|id| {
                (0..virtual_nodes).map(move |i| (xxh3_64(format!("{id}-{i}").as_bytes()), id))
            })
            .collect();
        let clockwise = points.iter().find(|(point, _)| *point >= hash);
        clockwise.or(points.first()).map(|(_, id)| (*id).clone())
    }

    fn node_ids(sizes: std::ops::Range<usize>) -> impl Strategy<Value = Vec<NodeId>> {
        prop::collection::btree_set("[a-z]{1,8}(-[a-z]{1,6})?(-[0-9]{1,3})?", sizes)
            .prop_map(|ids| ids.iter().map(|text| id(text)).collect())
    }

    #[test]
    fn three_nodes_share_3000_keys_within_700_and_1300_each() {
        let ring = HashRing::from_members(workers(3), VIRTUAL_NODES);
        let shares: Vec<usize> = shares(&ring, &keys(3_000)).into_values().collect();
        assert_eq!(shares.len(), 3);
        assert!(shares.iter().all(|share| (700..=1_300).contains(share)), "{shares:?}");
    }

    #[test]
    fn the_owner_is_the_same_on_every_node_and_in_every_version() {
        let ring = HashRing::from_members(workers(3), VIRTUAL_NODES);
        let owners: Vec<&str> =
            ["a", "b", "c", "user:42", ""].map(|key| ring.owner_of(key).unwrap().as_str()).into();
        assert_eq!(owners, ["worker-2", "worker-0", "worker-2", "worker-1", "worker-1"]);
        assert_eq!(
            ring.successors("a", 9).into_iter().map(NodeId::as_str).collect::<Vec<_>>(),
            ["worker-2", "worker-1", "worker-0"]
        );
    }

    #[test]
    fn a_hash_ring_without_members_has_no_owner() {
        let ring = HashRing::new(VIRTUAL_NODES);
        assert_eq!((ring.owner_of("a"), ring.len(), ring.is_empty()), (None, 0, true));
        assert!(ring.successors("a", 3).is_empty());
        assert_eq!(ring, HashRing::from_members([], VIRTUAL_NODES));
        let one = ring.with_member(&id("a"));
        assert_eq!(one.owner_of_hash(u64::MAX), Some(&id("a")));
        assert_eq!(one.owner_of_hash(0), Some(&id("a")));
        assert_eq!(one.without_member(&id("a")), ring);
        assert_eq!(one.without_member(&id("b")), one);
        assert_eq!(one.with_member(&id("a")), one);
    }

    fn member(text: &str) -> Member {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        Member {
            id: id(text),
            generation: Generation(1),
            incarnation: Incarnation::default(),
            state: MemberState::Alive,
            gossip: addr,
            steal: addr,
        }
    }

    #[test]
    fn who_comes_or_goes_changes_the_hash_ring() {
        let ring = |ids: &[&str]| HashRing::from_members(ids.iter().map(|text| id(text)), 7);
        let ab = ring(&["a", "b"]);
        let snapshot = |ids: &[&str]| MembershipEvent::Snapshot {
            epoch: 1,
            members: ids.iter().map(|text| member(text)).collect(),
        };

        let joined = MembershipEvent::Joined { epoch: 1, member: member("c") };
        assert_eq!(ab.apply(&joined), Some(ring(&["a", "b", "c"])));
        let died = MembershipEvent::Died { epoch: 1, member: member("b") };
        assert_eq!(ab.apply(&died), Some(ring(&["a"])));
        let left = MembershipEvent::Left { epoch: 1, member: member("a") };
        assert_eq!(ab.apply(&left), Some(ring(&["b"])));
        assert_eq!(ab.apply(&snapshot(&["b", "c"])), Some(ring(&["b", "c"])));
        assert_eq!(ab.apply(&snapshot(&[])), Some(ring(&[])));
    }

    #[test]
    fn what_leaves_the_members_as_they_are_leaves_the_hash_ring() {
        let ab = HashRing::from_members([id("a"), id("b")], 7);
        let members = ["a", "b"].map(member).into();
        let events = [
            MembershipEvent::Snapshot { epoch: 1, members },
            MembershipEvent::Joined { epoch: 1, member: member("a") },
            MembershipEvent::Updated { epoch: 1, member: member("a") },
            MembershipEvent::Suspected { epoch: 1, member: member("a") },
            MembershipEvent::Recovered { epoch: 1, member: member("a") },
            MembershipEvent::Died { epoch: 1, member: member("c") },
            MembershipEvent::Left { epoch: 1, member: member("c") },
        ];
        for event in events {
            assert_eq!(ab.apply(&event), None, "{event:?}");
        }
    }

    #[test]
    fn the_number_of_points_is_bounded() {
        assert_eq!(HashRing::new(0).virtual_nodes(), 1);
        assert_eq!(HashRing::new(u32::MAX).virtual_nodes(), VIRTUAL_NODES_MAX);
    }

    /// A hash of 64 bits does not collide in a test, so the points are made by hand.
    #[test]
    fn coinciding_points_belong_to_the_smaller_id() {
        let points = |points: &[(u64, MemberIndex)]| {
            let (hashes, owners) = points.iter().copied().unzip();
            Points::new(hashes, owners)
        };
        let (a, b) = (0, 1);
        let only_a = [5, 5, 9];
        let only_b = [5, 7];
        let both = points(&[(5, a), (5, a), (5, b), (7, b), (9, a)]);
        let alone = |own: &[u64]| points(&own.iter().map(|&hash| (hash, 0)).collect::<Vec<_>>());
        assert_eq!(alone(&only_a).with(&only_b, b), both, "b joins after a");
        assert_eq!(alone(&only_b).with(&only_a, a), both, "a joins after b");
        assert_eq!(both.without(&only_b, b), alone(&only_a));
        assert_eq!(both.without(&only_a, a), alone(&only_b));
        assert_eq!([5, 6, 10].map(|hash| both.at_or_after(hash)), [0, 3, 5]);
    }

    #[test]
    fn points_of_one_index_entry_are_told_apart() {
        let hashes: Vec<u64> = (0..1_000).map(|i| i << 32).collect();
        let points = Points::new(hashes.clone(), vec![0; 1_000]);
        assert_eq!(points.first[..2], [0, 1_000]);
        for (at, hash) in hashes.into_iter().enumerate() {
            assert_eq!(points.at_or_after(hash), at);
            assert_eq!(points.at_or_after(hash + 1), at + 1);
        }
    }

    #[test]
    fn a_corrected_index_is_that_of_a_new_hash_ring() {
        let ids = workers(20);
        let rings: Vec<HashRing> =
            (0..=ids.len()).map(|n| HashRing::from_members(ids[..n].to_vec(), 50)).collect();
        for (n, id) in ids.iter().enumerate() {
            assert_eq!(rings[n].with_member(id), rings[n + 1]);
            assert_eq!(rings[n + 1].without_member(id), rings[n]);
        }
        let kept = rings.windows(2).filter(|pair| pair[0].points.shift == pair[1].points.shift);
        assert_eq!(kept.count(), 15, "the others change the size of the index");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn lookups_follow_the_rule(
            ids in node_ids(0..8),
            virtual_nodes in 1_u32..20,
            hashes in prop::collection::vec(any::<u64>(), 50),
        ) {
            let ring = HashRing::from_members(ids.clone(), virtual_nodes);
            let edges = ring.points.hashes.iter().flat_map(|&p| [p.wrapping_sub(1), p, p.wrapping_add(1)]);
            for hash in hashes.into_iter().chain(edges).chain([0, u64::MAX]) {
                let expected = owner_by_the_rule(&ids, virtual_nodes, hash);
                prop_assert_eq!(ring.owner_of_hash(hash), expected.as_ref());
            }
        }

        /// With 150 points a share's standard deviation is about 1/sqrt(150) = 8 % of the mean; a
        /// half is six of these.
        #[test]
        fn every_set_of_nodes_shares_the_keys_evenly(ids in node_ids(2..12)) {
            let keys = keys(2_000);
            let ring = HashRing::from_members(ids.clone(), VIRTUAL_NODES);
            let shares = shares(&ring, &keys);
            let mean = keys.len() / ids.len();
            for id in &ids {
                let share = shares.get(id).copied().unwrap_or(0);
                prop_assert!(
                    (mean / 2..=mean + mean / 2).contains(&share),
                    "{id} has {share}, the mean is {mean}"
                );
            }
        }

        #[test]
        fn a_removal_moves_only_the_keys_of_the_removed(ids in node_ids(2..12), at: prop::sample::Index) {
            let gone = at.get(&ids).clone();
            let before = HashRing::from_members(ids.clone(), VIRTUAL_NODES);
            let after = before.without_member(&gone);
            let keys = keys(1_000);
            let mut moved = 0;
            for key in &keys {
                let owner = before.owner_of(key).unwrap();
                if *owner == gone {
                    moved += 1;
                    prop_assert_eq!(
                        after.owner_of(key).unwrap(), before.successors(key, 2)[1],
                        "a key goes to the next on the hash ring"
                    );
                } else {
                    prop_assert_eq!(after.owner_of(key).unwrap(), owner);
                }
            }
            if ids.len() == 3 {
                prop_assert!(moved < 600, "{moved} of 1,000 keys moved");
            }
        }

        #[test]
        fn a_join_moves_keys_only_to_the_newcomer(ids in node_ids(2..12), at: prop::sample::Index) {
            let new = at.get(&ids).clone();
            let after = HashRing::from_members(ids, VIRTUAL_NODES);
            let before = after.without_member(&new);
            let joined = before.with_member(&new);
            for key in keys(1_000) {
                let (old, now) = (before.owner_of(&key).unwrap(), joined.owner_of(&key).unwrap());
                prop_assert!(old == now || *now == new);
            }
            prop_assert_eq!(joined, after);
        }

        #[test]
        fn equal_members_make_equal_rings(
            (ids, order) in node_ids(1..10).prop_flat_map(|ids| (Just(ids.clone()), Just(ids).prop_shuffle())),
            churn in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..20),
            virtual_nodes in 1_u32..40,
        ) {
            let mut ring = HashRing::new(virtual_nodes);
            let mut present = BTreeSet::new();
            for (at, joins) in churn {
                let id = at.get(&ids);
                ring = if joins { ring.with_member(id) } else { ring.without_member(id) };
                if joins { present.insert(id.clone()); } else { present.remove(id); }
                prop_assert_eq!(&ring, &HashRing::from_members(present.clone(), virtual_nodes));
            }
            for id in &order {
                ring = ring.with_member(id);
            }
            prop_assert_eq!(&ring, &HashRing::from_members(ids.clone(), virtual_nodes));
            prop_assert_eq!(&ring, &HashRing::from_members(order.iter().chain(&ids).cloned(), virtual_nodes));
            prop_assert_eq!(ring.members(), ids);
        }
    }
}
