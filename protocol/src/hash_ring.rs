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
//! The points are cut by the high bits of their hashes into pages of about fifty. A page has an index
//! by the next bits, so that a lookup reads a point or two. A new snapshot shares every page that
//! gained or lost no point: among a thousand members a join copies a thirtieth of the points.
//!
//! Source: Karger et al., *Consistent hashing and random trees* (STOC 1997).

use std::io::Write as _;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::id::NodeId;
use crate::limits::VIRTUAL_NODES_MAX;

/// Points of a member on the hash ring, unless configured otherwise.
pub const VIRTUAL_NODES: u32 = 150;

/// Bits of a hash that a page's index is by.
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = 1 << BUCKET_BITS;

/// The members and their points. Cheap to keep in many versions, but not to clone: share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashRing {
    virtual_nodes: u32,
    members: Vec<NodeId>,
    /// By the high `page_bits` of a hash.
    pages: Vec<Arc<Page>>,
    page_bits: u32,
}

/// The points of one range of hashes, by hash, then by owner: where points of two members coincide,
/// the smaller id owns the keys.
#[derive(Debug, PartialEq, Eq)]
struct Page {
    /// For each bucket, how many points lie before it, up to 255: the scan of a lookup starts there.
    first: [u8; BUCKETS],
    hashes: Vec<u64>,
    owners: Vec<NodeId>,
}

impl HashRing {
    /// A hash ring without members, on which each will have `virtual_nodes` points (1 to
    /// [`VIRTUAL_NODES_MAX`]; what is outside is taken for the nearer end). More spread the keys more
    /// evenly and cost memory.
    pub fn new(virtual_nodes: u32) -> Self {
        Self::from_members([], virtual_nodes)
    }

    /// The hash ring of these members; one that is named twice counts once.
    pub fn from_members(ids: impl IntoIterator<Item = NodeId>, virtual_nodes: u32) -> Self {
        let virtual_nodes = virtual_nodes.clamp(1, VIRTUAL_NODES_MAX);
        let mut members: Vec<NodeId> = ids.into_iter().collect();
        members.sort_unstable();
        members.dedup();
        let mut points: Vec<(u64, NodeId)> = members
            .iter()
            .flat_map(|id| hashes_of(id, virtual_nodes).into_iter().map(|hash| (hash, id.clone())))
            .collect();
        points.sort_unstable();
        Self::paginate(virtual_nodes, members, points)
    }

    /// This hash ring with `id` on it.
    #[must_use]
    pub fn with_member(&self, id: &NodeId) -> Self {
        let Err(at) = self.members.binary_search(id) else { return self.clone() };
        let mut members = Vec::with_capacity(self.members.len() + 1);
        members.extend_from_slice(&self.members[..at]);
        members.push(id.clone());
        members.extend_from_slice(&self.members[at..]);

        let own = hashes_of(id, self.virtual_nodes);
        if page_bits(members.len(), self.virtual_nodes) != self.page_bits {
            let mut points: Vec<(u64, NodeId)> = self.points().collect();
            points.extend(own.into_iter().map(|hash| (hash, id.clone())));
            // Stable, for the points are two sorted runs: it merges them.
            points.sort();
            return Self::paginate(self.virtual_nodes, members, points);
        }
        let pages = self.change_pages(&own, |page, own| page.with(own, id, self.page_bits));
        Self { members, pages, ..*self }
    }

    /// This hash ring without `id`.
    #[must_use]
    pub fn without_member(&self, id: &NodeId) -> Self {
        let Ok(at) = self.members.binary_search(id) else { return self.clone() };
        let mut members = Vec::with_capacity(self.members.len() - 1);
        members.extend_from_slice(&self.members[..at]);
        members.extend_from_slice(&self.members[at + 1..]);

        if page_bits(members.len(), self.virtual_nodes) != self.page_bits {
            let points = self.points().filter(|(_, owner)| owner != id).collect();
            return Self::paginate(self.virtual_nodes, members, points);
        }
        let own = hashes_of(id, self.virtual_nodes);
        let pages = self.change_pages(&own, |page, _| page.without(id, self.page_bits));
        Self { members, pages, ..*self }
    }

    /// The pages, those changed that `own` hashes fall into.
    fn change_pages(
        &self,
        own: &[u64],
        mut change: impl FnMut(&Page, &[u64]) -> Page,
    ) -> Vec<Arc<Page>> {
        let page_of = |hash: u64| page_of(hash, self.page_bits);
        let mut pages = self.pages.clone();
        for own in own.chunk_by(|&a, &b| page_of(a) == page_of(b)) {
            let page = &mut pages[page_of(own[0])];
            *page = Arc::new(change(page, own));
        }
        pages
    }

    /// Cuts sorted points into pages.
    fn paginate(virtual_nodes: u32, members: Vec<NodeId>, points: Vec<(u64, NodeId)>) -> Self {
        let page_bits = page_bits(members.len(), virtual_nodes);
        let mut points = points.into_iter().peekable();
        let pages = (0..1 << page_bits)
            .map(|number| {
                let (mut hashes, mut owners) = (Vec::new(), Vec::new());
                while let Some((hash, owner)) =
                    points.next_if(|(hash, _)| page_of(*hash, page_bits) == number)
                {
                    hashes.push(hash);
                    owners.push(owner);
                }
                Arc::new(Page::new(hashes, owners, page_bits))
            })
            .collect();
        Self { virtual_nodes, members, pages, page_bits }
    }

    /// The owner of `key`; none when there are no members.
    #[inline]
    pub fn owner_of(&self, key: &str) -> Option<&NodeId> {
        self.owner_of_hash(xxh3_64(key.as_bytes()))
    }

    /// The owner of a key by its hash, `xxh3_64(key)`.
    #[inline]
    pub fn owner_of_hash(&self, hash: u64) -> Option<&NodeId> {
        let number = page_of(hash, self.page_bits);
        let page = &self.pages[number];
        if let Some(owner) = page.owners.get(page.position(hash, self.page_bits)) {
            return Some(owner);
        }
        let clockwise = self.pages[number + 1..].iter().chain(&self.pages[..=number]);
        clockwise.flat_map(|page| page.owners.first()).next()
    }

    /// Up to `n` different members in the order in which they would own `key` if those before them
    /// were gone.
    pub fn successors(&self, key: &str, n: usize) -> Vec<&NodeId> {
        let n = n.min(self.members.len());
        let hash = xxh3_64(key.as_bytes());
        let number = page_of(hash, self.page_bits);
        let page = &self.pages[number];
        let (before, after) = page.owners.split_at(page.position(hash, self.page_bits));
        let others = self.pages[number + 1..].iter().chain(&self.pages[..number]);
        let clockwise = after.iter().chain(others.flat_map(|page| &page.owners)).chain(before);

        let mut seen = vec![false; self.members.len()];
        let mut found = Vec::with_capacity(n);
        for owner in clockwise {
            if found.len() == n {
                break;
            }
            let Ok(member) = self.members.binary_search(owner) else { continue };
            if !std::mem::replace(&mut seen[member], true) {
                found.push(owner);
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

    fn points(&self) -> impl Iterator<Item = (u64, NodeId)> {
        self.pages
            .iter()
            .flat_map(|page| page.hashes.iter().copied().zip(page.owners.iter().cloned()))
    }
}

impl Page {
    fn new(hashes: Vec<u64>, owners: Vec<NodeId>, page_bits: u32) -> Self {
        let mut first = [0; BUCKETS];
        let mut bucket = 0;
        for (point, &hash) in hashes.iter().enumerate() {
            let end = bucket_of(hash, page_bits);
            while bucket < end {
                bucket += 1;
                first[bucket] = hint(point);
            }
        }
        first[bucket + 1..].fill(hint(hashes.len()));
        Self { first, hashes, owners }
    }

    /// The first point at or after `hash`; the number of points if there is none on this page.
    #[inline]
    fn position(&self, hash: u64, page_bits: u32) -> usize {
        let mut at = usize::from(self.first[bucket_of(hash, page_bits)]);
        while self.hashes.get(at).is_some_and(|&point| point < hash) {
            at += 1;
        }
        at
    }

    fn with(&self, own: &[u64], id: &NodeId, page_bits: u32) -> Self {
        let total = self.hashes.len() + own.len();
        let mut hashes = Vec::with_capacity(total);
        let mut owners = Vec::with_capacity(total);
        let mut copied = 0;
        for &hash in own {
            let mut end = self.position(hash, page_bits).max(copied);
            while self.hashes.get(end) == Some(&hash) && self.owners[end] < *id {
                end += 1;
            }
            hashes.extend_from_slice(&self.hashes[copied..end]);
            owners.extend_from_slice(&self.owners[copied..end]);
            hashes.push(hash);
            owners.push(id.clone());
            copied = end;
        }
        hashes.extend_from_slice(&self.hashes[copied..]);
        owners.extend_from_slice(&self.owners[copied..]);
        Self::new(hashes, owners, page_bits)
    }

    fn without(&self, id: &NodeId, page_bits: u32) -> Self {
        let kept = self.hashes.iter().zip(&self.owners).filter(|(_, owner)| *owner != id);
        let (hashes, owners) = kept.map(|(&hash, owner)| (hash, owner.clone())).unzip();
        Self::new(hashes, owners, page_bits)
    }
}

/// High bits of a hash that number the pages: as many buckets, in all, as there are points, or up to
/// twice as many.
fn page_bits(members: usize, virtual_nodes: u32) -> u32 {
    let points = members * virtual_nodes as usize;
    points.next_power_of_two().ilog2().saturating_sub(BUCKET_BITS).max(1)
}

fn page_of(hash: u64, page_bits: u32) -> usize {
    (hash >> (u64::BITS - page_bits)) as usize
}

fn bucket_of(hash: u64, page_bits: u32) -> usize {
    (hash >> (u64::BITS - page_bits - BUCKET_BITS)) as usize % BUCKETS
}

/// A scan that starts too early is slower, not wrong.
fn hint(point: usize) -> u8 {
    u8::try_from(point).unwrap_or(u8::MAX)
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

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

    #[test]
    fn the_number_of_points_is_bounded() {
        assert_eq!(HashRing::new(0).virtual_nodes(), 1);
        assert_eq!(HashRing::new(u32::MAX).virtual_nodes(), VIRTUAL_NODES_MAX);
    }

    /// A hash of 64 bits does not collide in a test, so the points are made by hand.
    #[test]
    fn coinciding_points_belong_to_the_smaller_id() {
        let (a, b) = (id("a"), id("b"));
        let page = |points: &[(u64, &NodeId)]| {
            let owners = points.iter().map(|(_, id)| (*id).clone()).collect();
            Page::new(points.iter().map(|(hash, _)| *hash).collect(), owners, 1)
        };
        let only_a = page(&[(5, &a), (5, &a), (9, &a)]);
        let only_b = page(&[(5, &b), (7, &b)]);
        let both = page(&[(5, &a), (5, &a), (5, &b), (7, &b), (9, &a)]);
        assert_eq!(only_a.with(&[5, 7], &b, 1), both, "b joins after a");
        assert_eq!(only_b.with(&[5, 5, 9], &a, 1), both, "a joins after b");
        assert_eq!(both.without(&b, 1), only_a);
        assert_eq!(both.without(&a, 1), only_b);
        assert_eq!((both.position(5, 1), both.position(6, 1), both.position(10, 1)), (0, 3, 5));
    }

    #[test]
    fn a_page_of_more_points_than_its_index_can_count_is_searched_all_the_same() {
        let hashes: Vec<u64> = (0..1_000).map(|i| i << 50).collect();
        let page = Page::new(hashes.clone(), vec![id("a"); 1_000], 1);
        for (point, hash) in hashes.into_iter().enumerate() {
            assert_eq!(page.position(hash, 1), point);
            assert_eq!(page.position(hash + 1, 1), point + 1);
        }
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
            let points: Vec<u64> = ring.points().map(|(hash, _)| hash).collect();
            let edges = points.iter().flat_map(|&p| [p.wrapping_sub(1), p, p.wrapping_add(1)]);
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
