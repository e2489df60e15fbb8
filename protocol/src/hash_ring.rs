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
//! Source: Karger et al., *Consistent hashing and random trees* (STOC 1997).

use std::io::Write as _;

use xxhash_rust::xxh3::xxh3_64;

use crate::id::NodeId;
use crate::limits::{MEMBERS_MAX, VIRTUAL_NODES_MAX};

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
    /// For each value of a hash's high bits, the first point that is not before it: a lookup starts
    /// there, and as there are at least as many values as points, it is about done.
    first: Vec<u32>,
    /// Right shift of a hash that leaves those high bits.
    shift: u32,
}

/// Points by hash, then by member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Points {
    hashes: Vec<u64>,
    owners: Vec<MemberIndex>,
}

impl HashRing {
    /// A hash ring without members, on which each will have `virtual_nodes` points (1 to
    /// [`VIRTUAL_NODES_MAX`]; what is outside is taken for the nearer end). More spread the keys more
    /// evenly and cost memory.
    pub fn new(virtual_nodes: u32) -> Self {
        let virtual_nodes = virtual_nodes.clamp(1, VIRTUAL_NODES_MAX);
        Self::assemble(virtual_nodes, Vec::new(), Points::default())
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
        Self::assemble(virtual_nodes, members, Points { hashes, owners })
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
        Self::assemble(self.virtual_nodes, members, points)
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
        Self::assemble(self.virtual_nodes, members, points)
    }

    fn assemble(virtual_nodes: u32, members: Vec<NodeId>, points: Points) -> Self {
        let bits = points.hashes.len().next_power_of_two().trailing_zeros().max(1);
        let shift = u64::BITS - bits;
        let first = first_points(&points.hashes, bits, shift);
        Self { virtual_nodes, members, points, first, shift }
    }

    /// The owner of `key`; none when there are no members.
    #[inline]
    pub fn owner_of(&self, key: &str) -> Option<&NodeId> {
        self.owner_of_hash(xxh3_64(key.as_bytes()))
    }

    /// The owner of a key by its hash, `xxh3_64(key)`.
    #[inline]
    pub fn owner_of_hash(&self, hash: u64) -> Option<&NodeId> {
        let owner = *self.points.owners.get(self.point_of(hash))?;
        Some(&self.members[usize::from(owner)])
    }

    /// Up to `n` different members in the order in which they would own `key` if those before them
    /// were gone.
    pub fn successors(&self, key: &str, n: usize) -> Vec<&NodeId> {
        let n = n.min(self.members.len());
        let mut seen = vec![false; self.members.len()];
        let mut found = Vec::with_capacity(n);
        let start = self.point_of(xxh3_64(key.as_bytes()));
        let (before, after) = self.points.owners.split_at(start.min(self.points.owners.len()));
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

    /// The place of the first point at or after `hash`, clockwise.
    #[inline]
    fn point_of(&self, hash: u64) -> usize {
        let mut point = self.first[(hash >> self.shift) as usize] as usize;
        while let Some(&at) = self.points.hashes.get(point) {
            if at >= hash {
                return point;
            }
            point += 1;
        }
        0
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
    /// These points and those of a member that becomes number `owner`. Copies the runs between the
    /// new points whole: nothing is sorted again.
    fn with(&self, own: &[u64], owner: MemberIndex) -> Self {
        let total = self.hashes.len() + own.len();
        let mut hashes = Vec::with_capacity(total);
        let mut owners = Vec::with_capacity(total);
        let mut copied = 0;
        for &hash in own {
            let end = self.position(copied, hash, owner);
            hashes.extend_from_slice(&self.hashes[copied..end]);
            hashes.push(hash);
            let run = &self.owners[copied..end];
            owners.extend(run.iter().map(|&o| o + MemberIndex::from(o >= owner)));
            owners.push(owner);
            copied = end;
        }
        hashes.extend_from_slice(&self.hashes[copied..]);
        owners.extend(self.owners[copied..].iter().map(|&o| o + MemberIndex::from(o >= owner)));
        Self { hashes, owners }
    }

    /// These points without those of member number `owner`.
    fn without(&self, own: &[u64], owner: MemberIndex) -> Self {
        let total = self.hashes.len() - own.len();
        let mut hashes = Vec::with_capacity(total);
        let mut owners = Vec::with_capacity(total);
        let mut copied = 0;
        for &hash in own {
            let end = self.position(copied, hash, owner);
            hashes.extend_from_slice(&self.hashes[copied..end]);
            let run = &self.owners[copied..end];
            owners.extend(run.iter().map(|&o| o - MemberIndex::from(o > owner)));
            copied = end + 1;
        }
        hashes.extend_from_slice(&self.hashes[copied..]);
        owners.extend(self.owners[copied..].iter().map(|&o| o - MemberIndex::from(o > owner)));
        Self { hashes, owners }
    }

    /// Where a point (`hash`, `owner`) is or belongs, not before `from`.
    fn position(&self, from: usize, hash: u64, owner: MemberIndex) -> usize {
        let mut at = from + self.hashes[from..].partition_point(|&h| h < hash);
        while self.hashes.get(at) == Some(&hash) && self.owners[at] < owner {
            at += 1;
        }
        at
    }
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

/// For each value of the high bits, how many points lie before all hashes with that value.
fn first_points(hashes: &[u64], bits: u32, shift: u32) -> Vec<u32> {
    let mut first = vec![0_u32; (1 << bits) + 1];
    // Within one value the last point's write stands: the count of points up to its end.
    for (point, hash) in (1_u32..).zip(hashes) {
        first[(hash >> shift) as usize + 1] = point;
    }
    let mut before = 0;
    for slot in &mut first {
        before = before.max(*slot);
        *slot = before;
    }
    first
}

fn member_index(i: usize) -> MemberIndex {
    MemberIndex::try_from(i).expect("a member table holds fewer than 65,536")
}
