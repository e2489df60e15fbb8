//! What a board promises, exactly: order, priority, recovery, and that nothing in its memory can
//! make it panic, hang, or claim a slot that is not there.

mod pass_heap;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use meshwork_protocol::pass::board::{LOW_TURN, Recovered, Walker};
use meshwork_protocol::pass::frame::Call;
use meshwork_protocol::pass::ring::Claim;
use meshwork_protocol::pass::slot::{SlotState, SlotWord};
use meshwork_protocol::pass::{ClosureId, PassId, Priority, WorkerIndex};
use pass_heap::{Heap, Ring};
use proptest::prelude::*;

type Words = Heap<AtomicU64>;

const RED: ClosureId = ClosureId(1);
const BLUE: ClosureId = ClosureId(2);

const FIRST: WorkerIndex = WorkerIndex(1);
const SECOND: WorkerIndex = WorkerIndex(2);

fn heap(slots: u32, cells: usize) -> Words {
    heap_at(slots, cells, 0)
}

fn heap_at(slots: u32, cells: usize, position: u64) -> Words {
    Heap::new(slots, cells, position, AtomicU64::new)
}

fn call(closure: ClosureId) -> Call {
    Call { closure, bytes: 8, attempts: 3, priority: Priority::High, timed: false }
}

fn low(closure: ClosureId) -> Call {
    Call { priority: Priority::Low, ..call(closure) }
}

fn anything(_: ClosureId) -> bool {
    true
}

/// The slots of all that is hinted, in the order in which a worker claims them.
fn claims(
    heap: &Words,
    walker: &mut Walker,
    can_run: impl Fn(ClosureId) -> bool + Copy,
) -> Vec<u32> {
    let claim = || heap.board().claim(walker, FIRST, can_run);
    std::iter::from_fn(claim).map(|claim| claim.slot).collect()
}

/// Ends every claimed pass, and collects it.
fn finish(heap: &Words) {
    for slot in 0..heap.words.len() as u32 {
        let word = heap.state(slot);
        if word.state() == Some(SlotState::Claimed) {
            assert!(heap.board().complete(Claim { slot, word }));
            heap.board().collect(slot, heap.state(slot)).expect("it is done");
        }
    }
}

/// Where the ring's first hint and its first open cell are: head and tail may be behind, by less than
/// the cells.
fn ends(ring: &Ring<AtomicU64>) -> (u64, u64) {
    let cells = ring.cells.len() as u64;
    let behind = |from: &AtomicU64, stays: fn(bool, bool) -> bool| {
        let from = from.load(Relaxed);
        let stays_at = |at: &u64| {
            let cell = ring.cells[(at % cells) as usize].load(Relaxed);
            let ahead = (cell >> 40).wrapping_sub(at / cells) & 0xff_ffff;
            // A hint of the lap before: the ring is full.
            ahead > 0x7f_ffff || stays(ahead == 0, cell & 0xf_ffff != 0)
        };
        (from..from + cells).find(stays_at).unwrap_or(from + cells)
    };
    let head = behind(&ring.head, |is_lap, _| is_lap);
    let tail = behind(&ring.tail, |is_lap, is_hint| is_lap && !is_hint);
    (head, tail.max(head))
}

mod order {
    use super::*;

    #[test]
    fn a_worker_takes_passes_of_all_its_closures_as_they_came() {
        let heap = heap(6, 16);
        for slot in [3, 1, 4, 0, 5, 2] {
            heap.submit(slot, call(if slot % 2 == 0 { RED } else { BLUE }));
        }
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [3, 1, 4, 0, 5, 2]);
    }

    #[test]
    fn a_worker_walks_past_what_it_cannot_run_and_another_takes_it() {
        let heap = heap(6, 16);
        for slot in [3, 1, 4, 0, 5, 2] {
            heap.submit(slot, call(if slot % 2 == 0 { RED } else { BLUE }));
        }
        assert_eq!(claims(&heap, &mut Walker::default(), |id| id == RED), [4, 0, 2]);
        assert_eq!(claims(&heap, &mut Walker::default(), |id| id == BLUE), [3, 1, 5]);
        assert_eq!(ends(&heap.high), (6, 6));
    }

    #[test]
    fn a_worker_with_one_closure_more_looks_again() {
        let heap = heap(2, 4);
        heap.submit(0, call(BLUE));
        heap.submit(1, call(RED));
        let mut walker = Walker::default();
        assert_eq!(claims(&heap, &mut walker, |id| id == RED), [1]);
        assert_eq!(claims(&heap, &mut walker, anything), []);
        walker.rewind();
        assert_eq!(claims(&heap, &mut walker, anything), [0]);
    }

    #[test]
    fn the_next_pass_of_a_slot_does_not_take_the_place_of_one_taken_back() {
        let heap = heap(3, 8);
        let taken_back = heap.submit(0, call(RED));
        heap.submit(1, call(RED));
        assert_eq!(format!("{:?}", heap.board().take_back(0, taken_back)), "Some(FREE(1))");
        assert_eq!(heap.board().take_back(0, taken_back), None);
        heap.submit(2, call(RED));
        heap.submit(0, call(RED));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [1, 2, 0]);
        assert_eq!(ends(&heap.high), (4, 4));
    }

    #[test]
    fn ends_that_a_process_left_behind_are_moved_by_the_next() {
        let heap = heap(2, 4);
        let mut walker = Walker::default();
        heap.submit(0, call(RED));
        // Killed between its hint and the tail.
        heap.high.tail.store(0, Relaxed);
        heap.submit(1, call(RED));
        assert_eq!(ends(&heap.high), (0, 2));
        assert_eq!(claims(&heap, &mut walker, anything), [0, 1]);
        // Killed between the cells and the head.
        heap.high.head.store(0, Relaxed);
        assert_eq!(claims(&heap, &mut Walker::default(), anything), []);
        assert_eq!(ends(&heap.high), (2, 2));
        heap.high.head.store(0, Relaxed);
        assert_eq!(claims(&heap, &mut walker, anything), []);
        assert_eq!(ends(&heap.high), (2, 2));
    }

    #[test]
    fn a_claimed_call_is_not_taken_back() {
        let heap = heap(1, 2);
        let ready = heap.submit(0, call(RED));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [0]);
        assert_eq!(heap.board().take_back(0, ready), None);
        assert_eq!(format!("{:?}", heap.state(0)), "CLAIMED(1, 0, by 1)");
    }

    #[test]
    fn every_eighth_claim_looks_at_low_priority_first() {
        let heap = heap(24, 64);
        for slot in 0..24 {
            heap.submit(slot, if slot < 20 { call(RED) } else { low(RED) });
        }
        assert_eq!(LOW_TURN, 8);
        assert_eq!(
            claims(&heap, &mut Walker::default(), anything),
            [0, 1, 2, 3, 4, 5, 6, 20, 7, 8, 9, 10, 11, 12, 13, 21, 14, 15, 16, 17, 18, 19, 22, 23]
        );
    }

    #[test]
    fn low_priority_is_served_while_nothing_else_waits() {
        let heap = heap(3, 8);
        heap.submit(0, low(RED));
        heap.submit(1, low(RED));
        let mut walker = Walker::default();
        assert_eq!(claims(&heap, &mut walker, anything), [0, 1]);
        heap.submit(2, call(RED));
        assert_eq!(claims(&heap, &mut walker, anything), [2]);
    }

    /// Hints of `blue` passes stand around those of passes that were taken back, until there is no
    /// room.
    #[test]
    fn a_full_ring_makes_room_and_keeps_its_order() {
        let heap = heap(4, 8);
        let taken_back = |slot| {
            let ready = heap.submit(slot, call(RED));
            heap.board().take_back(slot, ready).expect("nobody has claimed it");
        };
        heap.submit(0, call(BLUE));
        taken_back(3);
        taken_back(3);
        heap.submit(1, call(BLUE));
        (0..4).for_each(|_| taken_back(3));
        assert_eq!(ends(&heap.high), (0, 8));
        heap.submit(2, call(BLUE));
        assert_eq!(ends(&heap.high), (8, 11));
        assert_eq!(heap.board().rehint(0..4), 0);
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [0, 1, 2]);
    }

    #[test]
    fn one_pass_that_nobody_can_run_leaves_room_for_all_others() {
        let heap = heap(2, 4);
        heap.submit(0, call(BLUE));
        let mut walker = Walker::default();
        for _ in 0..40 {
            heap.submit(1, call(RED));
            assert_eq!(heap.board().rehint(0..2), 0);
            let claim = heap.board().claim(&mut walker, FIRST, |id| id == RED).expect("it waits");
            assert!(heap.board().complete(claim));
            heap.board().collect(1, heap.state(1)).expect("it is done");
        }
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [0]);
    }

    #[test]
    fn a_ring_full_of_passes_that_wait_stays_as_it_is() {
        let heap = heap(3, 2);
        heap.submit(0, call(RED));
        heap.submit(1, call(RED));
        heap.submit(2, call(RED));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [0, 1]);
        assert_eq!(heap.board().rehint(0..3), 1);
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [2]);
    }

    /// A head that stays where nobody looks any more would in the end seem to be ahead.
    #[test]
    fn the_head_follows_workers_that_have_looked_past_it() {
        let heap = heap(2, 4);
        let foreign = heap.submit(0, call(BLUE));
        let mut walker = Walker::default();
        let mut round = || {
            heap.submit(1, call(RED));
            assert_eq!(claims(&heap, &mut walker, |id| id == RED), [1]);
            finish(&heap);
        };
        round();
        assert_eq!(ends(&heap.high), (0, 2));
        heap.board().take_back(0, foreign).expect("nobody can run it");
        (0..1_000).for_each(|_| round());
        assert_eq!(ends(&heap.high), (1_002, 1_002));
        heap.submit(1, call(RED));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [1]);
        assert_eq!(ends(&heap.high), (1_003, 1_003));
    }

    proptest! {
        /// Laps are cut to 24 bits.
        #[test]
        fn order_holds_where_numbers_wrap(
            shift in 1u32..4,
            back in 0u64..40,
            ends_at in prop::sample::select(vec![1u64 << 24, 1 << 23]),
            counts in prop::collection::vec(1usize..5, 1..40),
        ) {
            let cells = 1 << shift;
            let heap = heap_at(8, cells, (ends_at << shift).wrapping_sub(back));
            let mut walker = Walker::default();
            let mut slot = 0;
            for count in counts {
                let submitted: Vec<u32> = (0..count.min(cells))
                    .map(|_| {
                        slot = (slot + 1) % 8;
                        heap.submit(slot, call(RED));
                        slot
                    })
                    .collect();
                prop_assert_eq!(claims(&heap, &mut walker, anything), submitted);
                let (head, tail) = ends(&heap.high);
                prop_assert_eq!(head, tail);
                finish(&heap);
            }
        }
    }
}

mod recovery {
    use super::*;

    /// Recovers; the slots poisoned, the slots announced.
    fn recover(heap: &Words, dead: WorkerIndex) -> (Recovered, Vec<u32>, Vec<u32>) {
        let (mut poisoned, mut announced) = (Vec::new(), Vec::new());
        let recovered =
            heap.board().recover(dead, |slot| poisoned.push(slot), |slot| announced.push(slot));
        (recovered, poisoned, announced)
    }

    /// A dead worker's slots: one to be run again, one at its attempts' end, one done and perhaps not
    /// announced; another worker's; one that waits.
    fn after_a_death() -> Words {
        let heap = heap(5, 16);
        heap.submit(0, low(RED));
        heap.submit(1, Call { attempts: 1, ..call(RED) });
        heap.submit(2, call(RED));
        heap.submit(3, call(RED));
        let mut walker = Walker::default();
        let mut claim = |worker| heap.board().claim(&mut walker, worker, anything);
        claim(FIRST).expect("slot 1");
        let done = claim(FIRST).expect("slot 2");
        claim(SECOND).expect("slot 3");
        claim(FIRST).expect("slot 0");
        assert!(heap.board().complete(done));
        heap.submit(4, call(RED));
        heap.board().fall_asleep(FIRST);
        heap.board().fall_asleep(SECOND);
        heap
    }

    /// The first pass of a slot.
    fn pass(slot: u32) -> PassId {
        PassId { slot, generation: 1 }
    }

    fn states(heap: &Words) -> Vec<String> {
        (0..5).map(|slot| format!("{:?}", heap.state(slot))).collect()
    }

    #[test]
    fn a_dead_workers_passes_wait_again_or_are_poisoned_and_nothing_else_is_touched() {
        let heap = after_a_death();
        let (recovered, poisoned, announced) = recover(&heap, FIRST);
        let expected = Recovered { requeued: vec![pass(0)], poisoned: vec![pass(1)], announced: 1 };
        assert_eq!(recovered, expected);
        assert_eq!((poisoned, announced), (vec![1], vec![1, 2]));
        assert_eq!(
            states(&heap),
            [
                "READY(1, 1)",
                "DONE(1, 0, by 1)",
                "DONE(1, 0, by 1)",
                "CLAIMED(1, 0, by 2)",
                "READY(1, 0)"
            ]
        );
        assert_eq!(heap.sleepers[0].load(Relaxed), 1 << SECOND.0);
        assert_eq!(heap.board().rehint(0..5), 0);
        assert_eq!(ends(&heap.low), (1, 2));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [4, 0]);
    }

    #[test]
    fn recovering_again_only_announces_again() {
        let heap = after_a_death();
        recover(&heap, FIRST);
        let before = states(&heap);
        let (recovered, poisoned, announced) = recover(&heap, FIRST);
        assert_eq!(recovered, Recovered { announced: 2, ..Recovered::default() });
        assert_eq!((poisoned, announced), (vec![], vec![1, 2]));
        assert_eq!(states(&heap), before);
    }

    #[test]
    fn attempts_are_as_many_as_the_call_says() {
        let heap = heap(1, 2);
        heap.submit(0, call(RED));
        for (attempt, requeued) in [(0, 1), (1, 1), (2, 0)] {
            let claim = heap.board().claim(&mut Walker::default(), FIRST, anything);
            assert_eq!(claim.map(|claim| claim.word.attempt()), Some(attempt));
            assert_eq!(recover(&heap, FIRST).0.requeued.len(), requeued);
        }
        assert_eq!(format!("{:?}", heap.state(0)), "DONE(1, 2, by 1)");
    }

    #[test]
    fn a_claim_that_was_taken_from_its_worker_is_not_completed() {
        let heap = heap(1, 2);
        heap.submit(0, call(RED));
        let claim = heap.board().claim(&mut Walker::default(), FIRST, anything).expect("it waits");
        recover(&heap, FIRST);
        assert!(!heap.board().complete(claim));
        let again = heap.board().claim(&mut Walker::default(), FIRST, anything).expect("it waits");
        assert!(!heap.board().complete(claim));
        assert!(heap.board().complete(again));
    }

    /// Makes a slot ready as a client does that is then killed.
    fn submit_unhinted(heap: &Words, slot: u32, call: Call) {
        heap.calls[slot as usize].store(call.to_bits(), Relaxed);
        let ready = heap.state(slot).ready().expect("the slot is free");
        heap.words[slot as usize].store(ready.bits(), Relaxed);
    }

    #[test]
    fn exactly_what_waits_without_a_hint_is_hinted_in_its_ring() {
        let heap = heap(6, 16);
        heap.submit(0, call(RED));
        submit_unhinted(&heap, 1, call(RED));
        submit_unhinted(&heap, 2, low(RED));
        submit_unhinted(&heap, 5, call(RED));
        // The hint of the pass before stands for none.
        let before = heap.submit(3, call(RED));
        heap.board().take_back(3, before).expect("nobody has claimed it");
        submit_unhinted(&heap, 3, call(RED));
        assert_eq!(heap.board().rehint(0..5), 3);
        assert_eq!(heap.board().rehint(0..5), 0);
        assert_eq!((ends(&heap.high), ends(&heap.low)), ((0, 4), (0, 1)));
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [0, 1, 3, 2]);
        assert_eq!(heap.board().rehint(0..heap.words.len() as u32 + 1), 1);
        assert_eq!(claims(&heap, &mut Walker::default(), anything), [5]);
    }

    #[test]
    fn a_look_at_the_slots_finds_what_is_not_hinted() {
        let heap = heap(3, 8);
        submit_unhinted(&heap, 1, call(BLUE));
        submit_unhinted(&heap, 2, call(RED));
        let mut walker = Walker::default();
        let mut scan = |slots| heap.board().scan(slots, &mut walker, FIRST, |id| id == RED);
        assert_eq!(scan(0..2), None);
        assert_eq!(scan(0..u32::MAX).map(|claim| claim.slot), Some(2));
        assert_eq!(scan(0..u32::MAX), None);
    }

    /// The look may have passed the slot of the first before it was submitted.
    #[test]
    fn a_look_at_the_slots_does_not_overtake_what_is_hinted() {
        let heap = heap(4, 8);
        heap.submit(1, call(RED));
        heap.submit(3, call(RED));
        let mut walker = Walker::default();
        let mut rest = || heap.board().scan(2..4, &mut walker, FIRST, anything);
        assert_eq!(rest().map(|claim| claim.slot), Some(1));
        assert_eq!(rest().map(|claim| claim.slot), Some(3));
    }
}

mod sleepers {
    use super::*;

    #[test]
    fn whoever_may_run_it_is_taken_once() {
        let mut heap = heap(1, 2);
        heap.sleepers.push(AtomicU64::new(0));
        let board = heap.board();
        for worker in [3, 70, 71] {
            board.fall_asleep(WorkerIndex(worker));
        }
        let late = |worker: WorkerIndex| worker.0 > 3;
        assert_eq!(board.take_sleeper(late), Some(WorkerIndex(70)));
        assert_eq!(board.take_sleeper(late), Some(WorkerIndex(71)));
        assert_eq!(board.take_sleeper(late), None);
        assert_eq!(board.take_sleeper(|_| true), Some(WorkerIndex(3)));
        assert_eq!(board.take_sleeper(|_| true), None);
    }

    #[test]
    fn a_worker_that_wakes_by_itself_knows_whether_it_was_being_woken() {
        let heap = heap(1, 2);
        let board = heap.board();
        board.fall_asleep(FIRST);
        assert!(board.wake_up(FIRST));
        board.fall_asleep(FIRST);
        assert_eq!(board.take_sleeper(|_| true), Some(FIRST));
        assert!(!board.wake_up(FIRST));
    }

    #[test]
    fn a_worker_without_a_bit_sleeps_by_its_time_out_alone() {
        let heap = heap(1, 2);
        heap.board().fall_asleep(WorkerIndex(64));
        assert!(!heap.board().wake_up(WorkerIndex(64)));
        assert_eq!(heap.board().take_sleeper(|_| true), None);
    }

    #[test]
    fn a_client_is_woken_if_it_sleeps() {
        let heap = heap(1, 2);
        let (completions, sleeping) = (AtomicU64::new(0), AtomicU64::new(0));
        assert!(!heap.board().announce(&completions, 1 << 5, &sleeping));
        heap.board().client_falls_asleep(&sleeping);
        assert!(heap.board().announce(&completions, 1 << 9, &sleeping));
        assert_eq!(completions.load(Relaxed), 1 << 5 | 1 << 9);
    }
}

/// Words as a fault leaves them: any bits, or nearly right ones.
fn word() -> impl Strategy<Value = u64> {
    let nearly = (0u64..5, 0u64..4, 0u64..3, 0u64..4).prop_map(|(state, attempt, worker, low)| {
        state << 60 | attempt << 54 | worker << 40 | low << 20 | low
    });
    prop_oneof![any::<u64>(), 0u64..8, nearly, any::<u64>().prop_map(|bits| !(bits >> 50))]
}

proptest! {
    #[test]
    fn nothing_in_memory_makes_it_panic_hang_or_claim_what_is_not_there(
        shift in 0u32..4,
        words in prop::collection::vec(word(), 3),
        calls in prop::collection::vec(word(), 3),
        ends in prop::collection::vec(word(), 4),
        cells in prop::collection::vec(word(), 16),
        asleep: u64,
    ) {
        let heap = heap(3, 1 << shift);
        let fill = |to: &[AtomicU64], from: &[u64]| {
            to.iter().zip(from).for_each(|(to, from)| to.store(*from, Relaxed));
        };
        fill(&heap.words, &words);
        fill(&heap.calls, &calls);
        fill(&heap.high.cells, &cells[..8]);
        fill(&heap.low.cells, &cells[8..]);
        heap.high.head.store(ends[0], Relaxed);
        heap.high.tail.store(ends[1], Relaxed);
        heap.low.head.store(ends[2], Relaxed);
        heap.low.tail.store(ends[3], Relaxed);
        heap.sleepers[0].store(asleep, Relaxed);
        let board = heap.board();
        let mut walker = Walker::default();
        let mut claimed = 0;
        while let Some(claim) = board.claim(&mut walker, FIRST, anything) {
            prop_assert!(claim.slot < 3);
            claimed += 1;
        }
        prop_assert!(claimed <= 3);
        board.recover(WorkerIndex(0), |slot| assert!(slot < 3), |slot| assert!(slot < 3));
        board.recover(FIRST, |slot| assert!(slot < 3), |slot| assert!(slot < 3));
        board.rehint(0..heap.words.len() as u32 + 9);
        for slot in 0..3 {
            let word = heap.state(slot);
            let _ = (board.publish(slot, word, Priority::Low, ends[3]), board.take_back(slot, word));
            let _ = (board.done(slot), board.complete(Claim { slot, word }));
        }
        while board.take_sleeper(|_| true).is_some() {}
        let mut walker = Walker::default();
        while let Some(claim) = board.scan(0..u32::MAX, &mut walker, SECOND, anything) {
            prop_assert!(claim.slot < 3);
        }
        prop_assert_eq!(heap.words.iter().filter(|word| {
            SlotWord::from_bits(word.load(Relaxed)).is_ready()
        }).count(), 0);
    }
}

/// One step of a process.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A client submits, and leaves a hint unless it is killed before.
    Submit {
        client: usize,
        call: Call,
        hinted: bool,
    },
    TakeBack {
        slot: u32,
    },
    Collect {
        client: usize,
    },
    /// A worker claims, from a hint or from the slots.
    Claim {
        worker: usize,
        hinted: bool,
    },
    /// It writes its reply, and tells the client unless it is killed before.
    Complete {
        worker: usize,
        told: bool,
    },
    Kill {
        worker: usize,
    },
    Recover {
        worker: usize,
    },
    Rehint,
}

const CLIENTS: usize = 2;
const CLIENT_SLOTS: u32 = 3;
const WORKERS: usize = 3;

fn step() -> impl Strategy<Value = Step> {
    let call =
        (prop::bool::weighted(0.7), any::<bool>(), 1u8..4).prop_map(|(red, low, attempts)| Call {
            closure: if red { RED } else { BLUE },
            bytes: 0,
            attempts,
            priority: if low { Priority::Low } else { Priority::High },
            timed: false,
        });
    prop_oneof![
        5 => (0..CLIENTS, call, prop::bool::weighted(0.8))
            .prop_map(|(client, call, hinted)| Step::Submit { client, call, hinted }),
        2 => (0..CLIENTS as u32 * CLIENT_SLOTS).prop_map(|slot| Step::TakeBack { slot }),
        3 => (0..CLIENTS).prop_map(|client| Step::Collect { client }),
        5 => (0..WORKERS, prop::bool::weighted(0.9))
            .prop_map(|(worker, hinted)| Step::Claim { worker, hinted }),
        4 => (0..WORKERS, prop::bool::weighted(0.8))
            .prop_map(|(worker, told)| Step::Complete { worker, told }),
        2 => (0..WORKERS).prop_map(|worker| Step::Kill { worker }),
        2 => (0..WORKERS).prop_map(|worker| Step::Recover { worker }),
        1 => Just(Step::Rehint),
    ]
}

/// How a pass ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    TakenBack,
    /// The token of the run whose reply was read.
    Returned(u64),
    Poisoned,
}

#[derive(Default)]
struct Worker {
    walker: Walker,
    claim: Option<Claim>,
    dead: bool,
}

const POISON: u64 = u64::MAX;

/// Processes on one board, and what became of every pass.
struct World {
    heap: Words,
    replies: Vec<u64>,
    completions: Vec<AtomicU64>,
    workers: [Worker; WORKERS],
    /// Accepted passes with how often a worker may die of each.
    accepted: BTreeMap<PassId, u8>,
    deaths: BTreeMap<PassId, u8>,
    outcomes: BTreeMap<PassId, Outcome>,
}

/// The first worker lacks a closure.
fn knows(worker: usize) -> impl Fn(ClosureId) -> bool + Copy {
    move |closure| worker > 0 || closure == RED
}

fn pass(slot: u32, word: SlotWord) -> PassId {
    PassId { slot, generation: word.generation() }
}

impl World {
    fn new() -> Self {
        let slots = CLIENTS as u32 * CLIENT_SLOTS;
        Self {
            heap: heap(slots, 8),
            replies: vec![0; slots as usize],
            completions: (0..CLIENTS).map(|_| AtomicU64::new(0)).collect(),
            workers: Default::default(),
            accepted: BTreeMap::new(),
            deaths: BTreeMap::new(),
            outcomes: BTreeMap::new(),
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Submit { client, call, hinted } => self.submit(client, call, hinted),
            Step::TakeBack { slot } => {
                let ready = self.heap.state(slot);
                if self.heap.board().take_back(slot, ready).is_some() {
                    self.end(pass(slot, ready), Outcome::TakenBack);
                }
            }
            Step::Collect { client } => self.collect(client),
            Step::Claim { worker, hinted } => self.claim(worker, hinted),
            Step::Complete { worker, told } => self.complete(worker, told),
            Step::Kill { worker } => self.kill(worker),
            Step::Recover { worker } => self.recover(worker),
            Step::Rehint => {
                self.heap.board().rehint(0..self.heap.words.len() as u32);
            }
        }
    }

    fn end(&mut self, pass: PassId, outcome: Outcome) {
        assert!(self.accepted.contains_key(&pass), "{pass} was never submitted");
        assert_eq!(self.outcomes.insert(pass, outcome), None, "{pass} ended twice");
    }

    fn submit(&mut self, client: usize, call: Call, hinted: bool) {
        let range = client as u32 * CLIENT_SLOTS..(client as u32 + 1) * CLIENT_SLOTS;
        let is_free = |slot: &u32| self.heap.state(*slot).state() == Some(SlotState::Free);
        let Some(slot) = range.clone().find(is_free) else { return };
        let ready = if hinted {
            self.heap.submit(slot, call)
        } else {
            let ready = self.heap.state(slot).ready().expect("the slot is free");
            self.heap.calls[slot as usize].store(call.to_bits(), Relaxed);
            self.heap.words[slot as usize].store(ready.bits(), Relaxed);
            ready
        };
        self.accepted.insert(pass(slot, ready), call.attempts);
    }

    fn collect(&mut self, client: usize) {
        let told = self.completions[client].swap(0, Relaxed);
        for slot in (0..64).filter(|slot| told >> slot & 1 == 1) {
            let Some(done) = self.heap.board().done(slot) else { continue };
            let reply = self.replies[slot as usize];
            let outcome =
                if reply == POISON { Outcome::Poisoned } else { Outcome::Returned(reply) };
            let pass = pass(slot, done);
            if outcome != Outcome::Poisoned {
                assert_eq!(reply, pass.fencing_token(done.attempt()), "another pass's reply");
            }
            self.end(pass, outcome);
            self.heap.board().collect(slot, done).expect("it is done");
        }
    }

    fn claim(&mut self, worker: usize, hinted: bool) {
        let Worker { walker, claim, dead } = &mut self.workers[worker];
        if *dead || claim.is_some() {
            return;
        }
        let (board, index) = (self.heap.board(), WorkerIndex(worker as u16));
        *claim = if hinted {
            board.claim(walker, index, knows(worker))
        } else {
            board.scan(0..u32::MAX, &mut Walker::default(), index, knows(worker))
        };
        if let Some(claim) = claim {
            let call = Call::from_bits(self.heap.calls[claim.slot as usize].load(Relaxed));
            assert!(knows(worker)(call.closure));
            let deaths = self.deaths.get(&pass(claim.slot, claim.word)).copied().unwrap_or(0);
            assert_eq!(claim.word.attempt(), deaths);
        }
    }

    fn complete(&mut self, worker: usize, told: bool) {
        let Some(claim) = self.workers[worker].claim.take() else { return };
        self.replies[claim.slot as usize] =
            pass(claim.slot, claim.word).fencing_token(claim.word.attempt());
        assert!(self.heap.board().complete(claim), "a living worker was robbed");
        if told {
            tell(&self.heap, &self.completions, claim.slot);
        } else {
            self.workers[worker].dead = true;
        }
    }

    fn kill(&mut self, worker: usize) {
        let worker = &mut self.workers[worker];
        worker.dead = true;
        if let Some(claim) = worker.claim.take() {
            *self.deaths.entry(pass(claim.slot, claim.word)).or_default() += 1;
        }
    }

    fn recover(&mut self, worker: usize) {
        if !self.workers[worker].dead {
            return;
        }
        let replies = &mut self.replies;
        self.heap.board().recover(
            WorkerIndex(worker as u16),
            |slot| replies[slot as usize] = POISON,
            |slot| tell(&self.heap, &self.completions, slot),
        );
        self.workers[worker] = Worker::default();
    }

    /// All go on until nothing is left. Every pass has ended, as it had to.
    fn settle(&mut self) {
        for worker in 0..WORKERS {
            self.complete(worker, true);
            self.recover(worker);
        }
        self.heap.board().rehint(0..self.heap.words.len() as u32);
        loop {
            self.claim(1, true);
            if self.workers[1].claim.is_none() {
                break;
            }
            self.complete(1, true);
        }
        (0..CLIENTS).for_each(|client| self.collect(client));
        for (pass, attempts) in &self.accepted {
            let deaths = self.deaths.get(pass).copied().unwrap_or(0);
            match self.outcomes.get(pass) {
                None => panic!("{pass} was lost"),
                Some(Outcome::Poisoned) => assert_eq!(deaths, *attempts),
                Some(Outcome::Returned(token)) => assert_eq!(*token, pass.fencing_token(deaths)),
                Some(Outcome::TakenBack) => {}
            }
        }
        for slot in 0..self.heap.words.len() as u32 {
            assert_eq!(self.heap.state(slot).state(), Some(SlotState::Free));
        }
        self.heap.map(|word| AtomicU64::new(word.load(Relaxed))).assert_works(call(RED));
    }
}

fn tell(heap: &Words, completions: &[AtomicU64], slot: u32) {
    let completions = &completions[(slot / CLIENT_SLOTS) as usize];
    heap.board().announce(completions, 1 << slot, &AtomicU64::new(0));
}

proptest! {
    /// Whatever clients, workers and their deaths do, every pass that was accepted ends once, with
    /// its own reply, and is poisoned only if it cost all its attempts.
    #[test]
    fn every_accepted_pass_ends_once(steps in prop::collection::vec(step(), 1..200)) {
        let mut world = World::new();
        for step in steps {
            world.apply(step);
        }
        world.settle();
    }
}
