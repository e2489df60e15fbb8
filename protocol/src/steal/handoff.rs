//! What was offered to thieves: offer, settle, retake.
//!
//! An offered job is in no deque: nobody runs it until the thief's transfer, or the victim's retake,
//! has moved its token. An offer stands, is then being retaken, and is gone; a settlement counts only
//! while it stands.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use crate::deque::Entry;
use crate::id::{FencingToken, JobId, Owner};
use crate::job::{Claim, ClaimedJob};
use crate::limits::{
    INLINE_ARGUMENT_BYTES_MAX, KEY_BYTES_MAX, NAME_BYTES_MAX, OFFER_INLINE_BYTES_MAX,
};
use crate::load::LoadReport;
use crate::time::Instant;
use crate::wire::stream::{Offer, OfferedJob};

/// How an offer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Jobs that this node holds again.
    pub returned: Vec<Entry>,
    /// How many the thief has.
    pub gone: usize,
}

#[derive(Clone, Debug)]
struct Standing {
    thief: Owner,
    entries: Vec<Entry>,
    /// When it is to be retaken; none while that is under way.
    deadline: Option<Instant>,
}

/// The offers in transit. Bounded by the deque that they come from: each holds a job at least.
#[derive(Clone, Debug, Default)]
pub struct InTransit {
    last_offer: u64,
    offers: BTreeMap<u64, Standing>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// In how many offers each job is: more than one when a claim was lost and won again meanwhile.
    offered: HashMap<JobId, usize>,
    jobs: usize,
}

impl InTransit {
    /// Jobs in transit.
    pub fn jobs(&self) -> usize {
        self.jobs
    }

    /// Whether the job is in transit.
    pub fn contains(&self, job: &JobId) -> bool {
        self.offered.contains_key(job)
    }

    /// When the next offer expires.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Takes up what is offered to `thief` until `deadline`; returns the offer's number, from 1.
    pub fn offer(&mut self, thief: Owner, entries: Vec<Entry>, deadline: Instant) -> u64 {
        self.last_offer += 1;
        self.jobs += entries.len();
        for entry in &entries {
            *self.offered.entry(entry.job.spec.id).or_default() += 1;
        }
        self.deadlines.insert((deadline, self.last_offer));
        let standing = Standing { thief, entries, deadline: Some(deadline) };
        self.offers.insert(self.last_offer, standing);
        self.last_offer
    }

    /// The thief got `taken` and nothing else. None when the offer does not stand, or not for it.
    pub fn settle(&mut self, thief: &Owner, offer: u64, taken: &[JobId]) -> Option<Settled> {
        let standing = self.offers.get(&offer).filter(|o| o.thief == *thief)?;
        let deadline = standing.deadline?;
        self.deadlines.remove(&(deadline, offer));
        let taken: HashSet<&JobId> = taken.iter().collect();
        self.end(offer, |entry| (!taken.contains(&entry.job.spec.id)).then_some(entry))
    }

    /// An offer that has expired, and is now being retaken.
    pub fn expire(&mut self, now: Instant) -> Option<(u64, Vec<Claim>)> {
        let &(deadline, offer) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now)?;
        self.deadlines.remove(&(deadline, offer));
        let standing = self.offers.get_mut(&offer).expect("a deadline has its offer");
        standing.deadline = None;
        Some((offer, standing.entries.iter().map(|entry| entry.job.claim()).collect()))
    }

    /// The retake of `offer` is done: this node holds `held` again. None when it was not under way.
    pub fn retaken(&mut self, offer: u64, held: &[Claim]) -> Option<Settled> {
        self.offers.get(&offer).filter(|o| o.deadline.is_none())?;
        let held: HashMap<JobId, FencingToken> = held.iter().map(|c| (c.job, c.token)).collect();
        self.end(offer, |mut entry| {
            entry.job.token = *held.get(&entry.job.spec.id)?;
            Some(entry)
        })
    }

    /// The retake of `offer` could not be done: it is due again at `retry`.
    pub fn retake_failed(&mut self, offer: u64, retry: Instant) {
        if let Some(standing) = self.offers.get_mut(&offer).filter(|o| o.deadline.is_none()) {
            standing.deadline = Some(retry);
            self.deadlines.insert((retry, offer));
        }
    }

    /// Forgets all offers; returns how many jobs were in transit.
    pub fn clear(&mut self) -> usize {
        self.offers.clear();
        self.deadlines.clear();
        self.offered.clear();
        std::mem::take(&mut self.jobs)
    }

    fn end(&mut self, offer: u64, keep: impl FnMut(Entry) -> Option<Entry>) -> Option<Settled> {
        let entries = self.offers.remove(&offer)?.entries;
        let offered = entries.len();
        self.jobs -= offered;
        for entry in &entries {
            if let Some(count) = self.offered.get_mut(&entry.job.spec.id) {
                *count -= 1;
                if *count == 0 {
                    self.offered.remove(&entry.job.spec.id);
                }
            }
        }
        let returned: Vec<Entry> = entries.into_iter().filter_map(keep).collect();
        Some(Settled { gone: offered - returned.len(), returned })
    }
}

/// What an encoded whole job has beside its arguments, at most: ids, numbers and tags, four names,
/// the key.
const JOB_BYTES: usize = 128 + 4 * NAME_BYTES_MAX + KEY_BYTES_MAX;

/// The frame that offers `jobs`. Jobs with large arguments, and those past the budget of whole jobs,
/// are named only.
pub(crate) fn offer_frame(
    seq: u32,
    offer: u64,
    jobs: Vec<ClaimedJob>,
    expires_after: Duration,
    load: Option<LoadReport>,
) -> Offer {
    let mut budget = OFFER_INLINE_BYTES_MAX;
    let jobs = jobs
        .into_iter()
        .map(|job| {
            let arguments = job.spec.arguments.len();
            let size = arguments + JOB_BYTES;
            if arguments > INLINE_ARGUMENT_BYTES_MAX || size > budget {
                return OfferedJob::Named(job.claim());
            }
            budget -= size;
            OfferedJob::Whole(job)
        })
        .collect();
    let expires_ms = u32::try_from(expires_after.as_millis()).unwrap_or(u32::MAX);
    Offer { seq, offer, expires_ms, jobs, load }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::deque::fixtures::{claimed, entry, id, job, owner, spec};
    use crate::id::{HandlerName, NodeId, Tenant};
    use crate::job::JobSpec;
    use crate::limits::{FRAME_BYTES_MAX, STEAL_BATCH_MAX};
    use crate::wire::stream::{StealFrame, encode_frame};

    #[test]
    fn a_claim_that_was_lost_and_won_again_may_be_in_two_offers() {
        let mut transit = InTransit::default();
        let deadline = Instant::from_micros(9);
        assert_eq!(transit.offer(owner("t"), vec![entry(1, true, 0)], deadline), 1);
        assert_eq!(transit.offer(owner("u"), vec![entry(1, true, 0)], deadline), 2);
        assert_eq!(transit.jobs(), 2);
        let settled = transit.settle(&owner("t"), 1, &[id(1)]);
        assert_eq!(settled, Some(Settled { returned: vec![], gone: 1 }));
        assert!(transit.contains(&id(1)));
        assert_eq!(transit.clear(), 1);
        assert!(!transit.contains(&id(1)) && transit.next_deadline().is_none());
    }

    #[test]
    fn large_arguments_travel_by_name() {
        let large = |n: usize| claimed(JobSpec { arguments: "x".repeat(n).into(), ..spec(2) }, 7);
        let at_most = large(INLINE_ARGUMENT_BYTES_MAX);
        let over = large(INLINE_ARGUMENT_BYTES_MAX + 1);
        let jobs = vec![job(1), at_most.clone(), over.clone()];
        let offer = offer_frame(3, 4, jobs, Duration::from_secs(5), None);
        assert_eq!((offer.seq, offer.offer, offer.expires_ms), (3, 4, 5_000));
        let expected = [
            OfferedJob::Whole(job(1)),
            OfferedJob::Whole(at_most),
            OfferedJob::Named(over.claim()),
        ];
        assert_eq!(offer.jobs, expected);
    }

    #[test]
    fn the_largest_offer_fits_a_frame() {
        let name = "n".repeat(NAME_BYTES_MAX);
        let largest = |arguments: usize| JobSpec {
            arguments: "x".repeat(arguments).into(),
            handler: HandlerName::new(&name).unwrap(),
            key: Some("k".repeat(KEY_BYTES_MAX).into()),
            tenant: Tenant::new(&name).unwrap(),
            origin: NodeId::new(&name).unwrap(),
            priority: i16::MIN,
            run_at_ms: u64::MAX,
            max_attempts: u32::MAX,
            enqueued_ms: u64::MAX,
            ..spec(1)
        };
        for arguments in [0, 100, 5_000, INLINE_ARGUMENT_BYTES_MAX] {
            let spec = Arc::new(largest(arguments));
            let job = ClaimedJob { spec, token: FencingToken(u64::MAX), attempt: u32::MAX };
            let whole = codec_len(&OfferedJob::Whole(job.clone()));
            assert!(whole <= arguments + JOB_BYTES, "a whole job has {whole} bytes");
            let jobs = vec![job; STEAL_BATCH_MAX];
            let offer = offer_frame(u32::MAX, u64::MAX, jobs, Duration::MAX, None);
            let frame = encode_frame(&StealFrame::Offer(offer)).unwrap();
            assert!(frame.len() < FRAME_BYTES_MAX);
        }
    }

    fn codec_len(job: &OfferedJob) -> usize {
        crate::wire::codec::encode(job).len()
    }
}
