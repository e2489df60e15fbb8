//! What one sees who looks at the passes of a directory and takes no part in them.
//!
//! Every number is read by itself while others write, so a snapshot is of about one moment: the
//! counts of two looks at the slots may differ by what moved between. Whether a participant is alive
//! is asked of the kernel, by its lock, which is not taken.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use meshwork_protocol::pass::layout::Geometry;
use meshwork_protocol::pass::slot::{SlotState, SlotWord};
use meshwork_protocol::pass::{ClientIndex, ClosureId, PassId, WorkerIndex};
use serde::Serialize;

use super::mapped_file::LockFile;
use super::pass_host::{CLIENT_BYTES, WORKER_BYTES};
use super::pass_ring::{ClosureRow, Holder, PassRing};
use crate::clock::Clock;

/// The passes of a directory at about one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassSnapshot {
    /// When it was taken, in microseconds since the boot.
    pub taken_us: u64,
    /// What the file was made for.
    pub geometry: Geometry,
    /// Rows that some worker has, or had when it died.
    pub workers: Vec<WorkerSnapshot>,
    /// Rows that some client has, or had when it ended with passes under way.
    pub clients: Vec<ClientSnapshot>,
    /// Passes under way, all clients together.
    pub in_flight: InFlight,
    /// What has happened since the file was made.
    pub counters: PassCounters,
}

/// Whether a participant is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// Its lock is held.
    Alive,
    /// Nobody holds its lock: what it had is taken over by the next who looks after the dead.
    Dead,
    /// A client that has ended, and whose passes run on for the next of its name.
    Left,
}

impl Presence {
    /// As text: `alive`, `dead`, `left`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Dead => "dead",
            Self::Left => "left",
        }
    }
}

/// A worker's row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerSnapshot {
    /// Which row.
    pub worker: WorkerIndex,
    /// Which holder of the row this is: no other has the same number.
    pub epoch: u64,
    /// What it is called.
    pub name: String,
    /// Its process, in that process's namespace of numbers.
    pub pid: u32,
    /// Whether it is there.
    pub state: Presence,
    /// How long ago it joined, in microseconds.
    pub up_us: u64,
    /// Passes it has finished.
    pub finished: u64,
    /// The closures that it runs: their names, or their ids where they have none.
    pub runs: Vec<String>,
    /// The pass that it runs now.
    pub running: Option<RunningPass>,
}

/// A pass that a worker runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunningPass {
    /// Which.
    pub pass: PassId,
    /// What it runs: a closure's name, or its id where it has none.
    pub closure: String,
    /// Which run it is, from zero.
    pub attempt: u8,
    /// How long it may run on, in microseconds, where it is timed; below zero past its deadline.
    pub left_us: Option<i64>,
}

/// A client's row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClientSnapshot {
    /// Which row.
    pub client: ClientIndex,
    /// Which holder of the row this is.
    pub epoch: u64,
    /// What it is called.
    pub name: String,
    /// Its process, in that process's namespace of numbers.
    pub pid: u32,
    /// Whether it is there.
    pub state: Presence,
    /// How long ago it joined, in microseconds.
    pub up_us: u64,
    /// The first slot of its range.
    pub first_slot: u32,
    /// How many slots it has.
    pub slots: u32,
    /// Those in use, by their state.
    pub in_flight: InFlight,
    /// Replies it has collected.
    pub collected: u64,
}

/// Slots in use, by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InFlight {
    /// A call waits for a worker.
    pub ready: u32,
    /// A worker runs it.
    pub claimed: u32,
    /// A reply waits for the client.
    pub done: u32,
}

impl InFlight {
    /// Slots in use.
    pub fn total(self) -> u32 {
        self.ready + self.claimed + self.done
    }

    fn add(&mut self, other: Self) {
        self.ready += other.ready;
        self.claimed += other.claimed;
        self.done += other.done;
    }
}

/// What has happened since the file was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PassCounters {
    /// Passes of dead workers that waited again.
    pub requeued: u64,
    /// Passes whose attempts were over.
    pub poisoned: u64,
    /// Replies that a client took over from its predecessor.
    pub adopted: u64,
    /// Replies that nobody came for.
    pub orphaned: u64,
}

/// How fast passes went between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PassRates {
    /// Passes that workers finished, a second. What a worker finished that left in between is not
    /// counted.
    pub finished_per_s: f64,
    /// Replies that clients collected, a second. As with workers.
    pub collected_per_s: f64,
}

impl PassRates {
    /// The rates between a look and a later one.
    pub fn between(earlier: &PassSnapshot, later: &PassSnapshot) -> Self {
        let finished = |all: &PassSnapshot| -> Vec<(u16, u64, u64)> {
            all.workers.iter().map(|w| (w.worker.0, w.epoch, w.finished)).collect()
        };
        let collected = |all: &PassSnapshot| -> Vec<(u16, u64, u64)> {
            all.clients.iter().map(|c| (c.client.0, c.epoch, c.collected)).collect()
        };
        let seconds = later.taken_us.saturating_sub(earlier.taken_us).max(1) as f64 / 1e6;
        Self {
            finished_per_s: grown(&finished(earlier), &finished(later)) as f64 / seconds,
            collected_per_s: grown(&collected(earlier), &collected(later)) as f64 / seconds,
        }
    }
}

/// By how much the counts of rows have grown, each row given as its index, its epoch and its count.
/// A new holder's count began at zero.
fn grown(earlier: &[(u16, u64, u64)], later: &[(u16, u64, u64)]) -> u64 {
    let before = |index, epoch| {
        let found = earlier.iter().find(|row| row.0 == index && row.1 == epoch);
        found.map_or(0, |row| row.2)
    };
    later.iter().map(|(index, epoch, count)| count.saturating_sub(before(*index, *epoch))).sum()
}

impl PassSnapshot {
    /// Looks at the memory and the locks of a directory.
    ///
    /// # Errors
    ///
    /// The lock file cannot be used.
    pub fn take(ring: &PassRing, locks: &LockFile) -> io::Result<Self> {
        let taken_us = Clock.now().as_micros();
        let mut workers = worker_rows(ring, locks, taken_us)?;
        let mut clients = client_rows(ring, locks, taken_us)?;
        let mut in_flight = InFlight::default();
        for client in &mut clients {
            for slot in ring.range(client.client) {
                let word = ring.word(slot);
                match word.state() {
                    Some(SlotState::Ready) => client.in_flight.ready += 1,
                    Some(SlotState::Done) => client.in_flight.done += 1,
                    Some(SlotState::Claimed) => {
                        client.in_flight.claimed += 1;
                        let worker = workers.iter_mut().find(|row| row.worker == word.worker());
                        if let Some(worker) = worker {
                            worker.running = Some(running(ring, slot, word, taken_us));
                        }
                    }
                    Some(SlotState::Free) | None => {}
                }
            }
            in_flight.add(client.in_flight);
        }
        let header = ring.header();
        let counters = PassCounters {
            requeued: header.requeued.load(Relaxed),
            poisoned: header.poisoned.load(Relaxed),
            adopted: header.adopted.load(Relaxed),
            orphaned: header.orphaned.load(Relaxed),
        };
        Ok(Self {
            taken_us,
            geometry: ring.layout().geometry,
            workers,
            clients,
            in_flight,
            counters,
        })
    }
}

fn worker_rows(
    ring: &PassRing,
    locks: &LockFile,
    taken_us: u64,
) -> io::Result<Vec<WorkerSnapshot>> {
    let mut rows = Vec::new();
    for (index, row) in ring.workers().iter().enumerate() {
        let Some(epoch) = holder_of(&row.holder) else { continue };
        let is_held = locks.is_held(WORKER_BYTES + index as u64)?;
        let mut runs = Vec::new();
        for (word, bits) in row.runs.iter().enumerate() {
            let mut bits = bits.load(Acquire);
            while bits != 0 {
                let closure = &ring.closures()[word * 64 + bits.trailing_zeros() as usize];
                runs.extend(closure_name(closure));
                bits &= bits - 1;
            }
        }
        runs.sort();
        rows.push(WorkerSnapshot {
            worker: WorkerIndex(index as u16),
            epoch,
            name: row.name.read(),
            pid: row.holder.pid.load(Relaxed),
            state: if is_held { Presence::Alive } else { Presence::Dead },
            up_us: taken_us.saturating_sub(row.holder.joined_us.load(Relaxed)),
            finished: row.finished().load(Relaxed),
            runs,
            running: None,
        });
    }
    Ok(rows)
}

fn client_rows(
    ring: &PassRing,
    locks: &LockFile,
    taken_us: u64,
) -> io::Result<Vec<ClientSnapshot>> {
    let mut rows = Vec::new();
    for (index, row) in ring.clients().iter().enumerate() {
        let Some(epoch) = holder_of(&row.holder) else { continue };
        let client = ClientIndex(index as u16);
        // Whoever tends what a client left holds its lock for a moment.
        let state = match row.left_us().load(Relaxed) {
            0 if locks.is_held(CLIENT_BYTES + index as u64)? => Presence::Alive,
            0 => Presence::Dead,
            _ => Presence::Left,
        };
        let range = ring.range(client);
        rows.push(ClientSnapshot {
            client,
            epoch,
            name: row.name.read(),
            pid: row.holder.pid.load(Relaxed),
            state,
            up_us: taken_us.saturating_sub(row.holder.joined_us.load(Relaxed)),
            first_slot: range.start,
            slots: range.len() as u32,
            in_flight: InFlight::default(),
            collected: row.collected().load(Relaxed),
        });
    }
    Ok(rows)
}

/// The epoch of a row that is held, or was by one who died.
fn holder_of(holder: &Holder) -> Option<u64> {
    let epoch = holder.epoch.load(Acquire);
    (epoch % 2 == 1).then_some(epoch)
}

fn running(ring: &PassRing, slot: u32, word: SlotWord, taken_us: u64) -> RunningPass {
    let call = ring.call(slot);
    let row = ring.worker(word.worker());
    let deadline_us = row.deadline_us().load(Acquire);
    let is_timed = deadline_us != 0 && row.current().load(Relaxed) == u64::from(slot) + 1;
    RunningPass {
        pass: PassId { slot, generation: word.generation() },
        closure: name_of(ring, call.closure),
        attempt: word.attempt(),
        left_us: is_timed.then(|| left(deadline_us, taken_us)),
    }
}

fn left(deadline_us: u64, now_us: u64) -> i64 {
    let left = i128::from(deadline_us) - i128::from(now_us);
    i64::try_from(left).unwrap_or(i64::MAX)
}

fn name_of(ring: &PassRing, closure: ClosureId) -> String {
    let row = ring.find_closure(closure).map(|row| &ring.closures()[usize::from(row)]);
    row.and_then(closure_name).unwrap_or_else(|| closure.to_string())
}

fn closure_name(row: &ClosureRow) -> Option<String> {
    let name = row.name.read();
    if name.is_empty() { row.id().map(|id| id.to_string()) } else { Some(name) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::host::mapped_file::{FILE_NAME, OpenError};
    use crate::host::pass::Pass;
    use crate::host::pass_client::{ClientOptions, PassClient};
    use crate::host::pass_host::PassHost;
    use crate::host::registry::PassRegistry;
    use crate::host::worker_thread::{WorkerOptions, WorkerThread};

    fn open(directory: &Path) -> Arc<PassHost> {
        let geometry = Geometry { clients: 4, slots_per_client: 64, ..Geometry::default() };
        PassHost::open(directory, Some(geometry)).unwrap()
    }

    fn join(host: &Arc<PassHost>, name: &str) -> PassClient {
        PassClient::join(host, ClientOptions { name: name.into(), ..Default::default() }).unwrap()
    }

    #[test]
    fn a_look_shows_who_is_there_and_what_is_under_way() {
        let directory = tempfile::tempdir().unwrap();
        let host = open(directory.path());
        let registry = PassRegistry::new();
        let (begun, has_begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let may_go = std::sync::Mutex::new(may_go);
        registry
            .register("hold", move |_| {
                begun.send(()).unwrap();
                may_go.lock().unwrap().recv().unwrap();
                Ok::<_, String>([])
            })
            .unwrap();
        registry.register_id(ClosureId(7), |_| Ok::<_, String>([])).unwrap();
        let options = WorkerOptions { name: "w".into(), ..Default::default() };
        let worker = WorkerThread::spawn(&host, registry, &options).unwrap();
        let client = join(&host, "c");
        let first = client.submit(&Pass::named("hold", b"".as_slice()).deadline(Duration::MAX));
        has_begun.recv().unwrap();
        client.submit(&Pass::named("hold", b"".as_slice()).low_priority()).unwrap();
        client.submit(&Pass::named("nobody's", b"".as_slice())).unwrap();

        let seen = PassHost::look(directory.path()).unwrap();
        let pid = std::process::id();
        let (worker_up, client_up) = (seen.workers[0].up_us, seen.clients[0].up_us);
        let left_us = seen.workers[0].running.as_ref().and_then(|running| running.left_us);
        assert!(left_us.is_some_and(|left| left > 0), "{seen:?}");
        let in_flight = InFlight { ready: 2, claimed: 1, done: 0 };
        let expected = PassSnapshot {
            taken_us: seen.taken_us,
            geometry: host.ring().layout().geometry,
            workers: vec![WorkerSnapshot {
                worker: worker.index(),
                epoch: 1,
                name: "w".into(),
                pid,
                state: Presence::Alive,
                up_us: worker_up,
                finished: 0,
                runs: vec!["0x7".into(), "hold".into()],
                running: Some(RunningPass {
                    pass: first.unwrap(),
                    closure: "hold".into(),
                    attempt: 0,
                    left_us,
                }),
            }],
            clients: vec![ClientSnapshot {
                client: client.index(),
                epoch: 1,
                name: "c".into(),
                pid,
                state: Presence::Alive,
                up_us: client_up,
                first_slot: 0,
                slots: 64,
                in_flight,
                collected: 0,
            }],
            in_flight,
            counters: PassCounters::default(),
        };
        assert_eq!(seen, expected);

        go.send(()).unwrap();
        go.send(()).unwrap();
        let mut ended = 0;
        while ended < 2 {
            ended += client.poll(|_| {});
        }
        let later = host.snapshot().unwrap();
        assert_eq!(later.workers[0].finished, 2);
        assert_eq!(later.workers[0].running, None);
        assert_eq!(later.clients[0].collected, 2);
        assert_eq!(later.in_flight, InFlight { ready: 1, claimed: 0, done: 0 });
    }

    #[test]
    fn the_dead_are_told_from_the_living_and_from_those_who_left() {
        let directory = tempfile::tempdir().unwrap();
        let host = open(directory.path());
        let killed = host.join_worker("killed").unwrap();
        let alive = host.join_worker("alive").unwrap();
        // A seat that is dropped without leaving is what the kernel leaves of a killed process.
        drop(killed);
        drop(host.join_client("killed").unwrap());
        let left = join(&host, "left");
        left.submit(&Pass::named("nobody's", b"".as_slice())).unwrap();
        drop(left);
        let clean = join(&host, "clean");
        let seen = PassHost::look(directory.path()).unwrap();
        let workers: Vec<_> = seen.workers.iter().map(|w| (w.name.as_str(), w.state)).collect();
        assert_eq!(workers, [("killed", Presence::Dead), ("alive", Presence::Alive)]);
        let clients: Vec<_> = seen.clients.iter().map(|c| (c.name.as_str(), c.state)).collect();
        assert_eq!(
            clients,
            [("killed", Presence::Dead), ("left", Presence::Left), ("clean", Presence::Alive)]
        );
        drop(clean);
        host.leave_worker(alive);
        let seen = PassHost::look(directory.path()).unwrap();
        assert_eq!((seen.workers.len(), seen.clients.len()), (1, 2));
    }

    #[test]
    fn a_look_takes_no_lock_and_makes_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let gone = directory.path().join("gone");
        let error = |path: &Path| PassHost::look(path).unwrap_err();
        assert_eq!(
            error(&gone).to_string(),
            format!(
                "no passes at {}: there is no such directory; name the one that the processes open",
                gone.display()
            )
        );
        assert!(!gone.exists());
        assert!(matches!(error(directory.path()), OpenError::Nothing { .. }));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);

        let host = open(directory.path());
        PassHost::look(directory.path()).unwrap();
        // Every row is still to be had.
        let seats: Vec<_> = (0..64).map(|_| host.join_worker("").unwrap()).collect();
        PassHost::look(directory.path()).unwrap();
        drop(seats);

        let file = directory.path().join(FILE_NAME);
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, [7; 10_000]).unwrap();
        assert!(matches!(error(directory.path()), OpenError::File { .. }));
    }

    #[test]
    fn rates_count_a_rows_new_holder_from_zero() {
        let directory = tempfile::tempdir().unwrap();
        let host = open(directory.path());
        let _seats = [host.join_worker("a").unwrap(), host.join_worker("b").unwrap()];
        let _range = host.join_client("c").unwrap();
        let mut earlier = host.snapshot().unwrap();
        earlier.workers[0].finished = 100;
        earlier.workers[1].finished = 1_000;
        earlier.clients[0].collected = 10;
        let mut later = earlier.clone();
        later.taken_us += 500_000;
        later.workers[0].finished = 150;
        later.workers[1].epoch += 2;
        later.workers[1].finished = 3;
        later.clients[0].collected = 11;
        let rates = PassRates::between(&earlier, &later);
        assert_eq!(rates, PassRates { finished_per_s: 106.0, collected_per_s: 2.0 });
    }
}
