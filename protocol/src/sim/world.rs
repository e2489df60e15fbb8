//! Hosts, their clocks, and the events that pass between them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::id::{Generation, Incarnation, NodeId};
use crate::limits::DATAGRAM_BYTES_MAX;
use crate::load::Load;
use crate::sim::host::{End, Host};
use crate::sim::invariants::Invariant;
use crate::sim::machines::{Input, Machines, Output};
use crate::sim::network::{Faults, Network, within};
use crate::sim::streams::Stream;
use crate::swim::members::DialError;
use crate::swim::node::{Mail, Node};
use crate::swim::{Answer, Member, MemberState, SwimConfig};
use crate::time::Instant;
use crate::wire::datagram::{self, Datagram, MeshId, Sender};

/// Datagrams that a socket holds for a process that does not read.
const SOCKET_BUFFER: usize = 256;

/// Which host, in order of [`World::add`].
pub type HostIx = usize;

#[derive(Debug)]
pub(super) enum Event {
    /// Something of one boot of a host.
    Input {
        host: HostIx,
        boot: u64,
        input: Input,
    },
    /// A datagram: whoever has the port when it arrives gets it.
    Datagram {
        host: HostIx,
        from: SocketAddr,
        datagram: Datagram,
    },
    /// A host's timers, if no earlier wake took the place of this one.
    Wake {
        host: HostIx,
        sequence: u64,
    },
    Connect {
        stream: u64,
    },
    Answered {
        stream: u64,
        answer: Result<(Sender, Answer), DialError>,
    },
}

/// What happened in one step: an input to one host, and what came of it.
#[derive(Debug)]
pub struct Step<'a> {
    /// The world after the step.
    pub world: &'a World,
    /// Who acted.
    pub host: HostIx,
    /// What it put out.
    pub outputs: &'a [Output],
}

impl Step<'_> {
    /// Whether the node's member table may have changed in this step.
    pub fn touched_the_table(&self) -> bool {
        self.outputs.iter().any(|output| matches!(output, Output::Mail(Mail::Changed(_))))
    }
}

/// A mesh on virtual time.
#[derive(Debug)]
pub struct World {
    /// What passes between hosts.
    pub network: Network,
    config: SwimConfig,
    mesh: MeshId,
    now: Instant,
    pub(super) rng: fastrand::Rng,
    queue: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    pub(super) hosts: Vec<Host>,
    pub(super) names: BTreeMap<String, SocketAddr>,
    /// The model store: the newest generation of each name.
    generations: BTreeMap<NodeId, Generation>,
    pub(super) streams: BTreeMap<u64, Stream>,
    pub(super) next_stream: u64,
    invariants: Vec<Box<dyn Invariant>>,
    false_deaths_allowed: bool,
    digest: u64,
    datagrams: u64,
}

impl World {
    /// A world without hosts, held to every invariant.
    ///
    /// # Panics
    /// When `config` is not valid.
    pub fn new(seed: u64, config: SwimConfig, faults: Faults) -> Self {
        config.validate().expect("a valid configuration");
        Self {
            network: Network::new(faults),
            config,
            mesh: MeshId::of("sim"),
            now: Instant::ZERO,
            rng: fastrand::Rng::with_seed(seed),
            queue: BTreeMap::new(),
            sequence: 0,
            hosts: Vec::new(),
            names: BTreeMap::new(),
            generations: BTreeMap::new(),
            streams: BTreeMap::new(),
            next_stream: 0,
            invariants: crate::sim::invariants::all(),
            false_deaths_allowed: false,
            digest: seed,
            datagrams: 0,
        }
    }

    /// A world of `count` hosts, `n0` and so on, each with the first as its seed, all started.
    pub fn mesh(seed: u64, config: SwimConfig, faults: Faults, count: usize) -> Self {
        let mut world = Self::new(seed, config, faults);
        for i in 0..count {
            world.add(&format!("n{i}"), &["10.0.0.1:7946"]);
            world.start(i);
        }
        world
    }

    /// Adds a host with an address of its own. It is down.
    ///
    /// # Panics
    /// When `name` is no node id.
    pub fn add(&mut self, name: &str, seeds: &[&str]) -> HostIx {
        let index = self.hosts.len();
        let seeds = seeds.iter().map(ToString::to_string).collect();
        let id = NodeId::new(name).expect("a valid name");
        self.hosts.push(Host::new(id, address(index + 1), seeds));
        index
    }

    /// Lets a host name resolve.
    pub fn resolve(&mut self, name: &str, addr: SocketAddr) {
        self.names.insert(name.to_string(), addr);
    }

    /// Starts a host that is down, with a generation from the store.
    pub fn start(&mut self, host: HostIx) {
        let id = self.hosts[host].id.clone();
        let generation = self.register(&id, Generation(0));
        self.start_with(host, generation);
    }

    /// Starts a host that is down with a generation of the caller's choice, as one without a store.
    pub fn start_with(&mut self, host: HostIx, generation: Generation) {
        let (seed, clock) = (self.rng.u64(..), self.rng.u64(0..1_000_000_000));
        let it = &mut self.hosts[host];
        assert!(it.machines.is_none(), "{} is up", it.id);
        let me = Member {
            id: it.id.clone(),
            generation,
            incarnation: Incarnation(0),
            state: MemberState::Alive,
            gossip: it.addr,
            steal: SocketAddr::new(it.addr.ip(), it.addr.port() + 1),
        };
        let swim = Node::new(self.config.clone(), me, it.seeds.clone(), seed);
        it.machines = Some(Machines { swim });
        it.boot += 1;
        it.clock = Duration::from_micros(clock);
        (it.end, it.disturbed, it.paused, it.leaving) = (None, false, false, false);
        it.backlog.clear();
        it.wake = None;
        self.step(host, Input::Start);
    }

    fn register(&mut self, id: &NodeId, at_least: Generation) -> Generation {
        let newest = self.generations.entry(id.clone()).or_default();
        *newest = newest.next().max(at_least);
        *newest
    }

    /// Makes the store forget a name: its next generation is the first again.
    pub fn forget_generations(&mut self, host: HostIx) {
        self.generations.remove(&self.hosts[host].id);
    }

    /// Kills a host's node.
    pub fn crash(&mut self, host: HostIx) {
        self.hosts[host].machines = None;
        self.hosts[host].wake = None;
    }

    /// Gives a host that is down an address that nobody had.
    pub fn move_host(&mut self, host: HostIx) {
        assert!(self.hosts[host].machines.is_none(), "a running node keeps its address");
        let index = host + 1 + 100 * (1 + self.hosts[host].boot as usize);
        self.hosts[host].addr = address(index);
    }

    /// Tells a node to leave. It keeps running until it is crashed.
    pub fn leave(&mut self, host: HostIx) {
        self.hosts[host].leaving = true;
        self.step(host, Input::Leave);
    }

    /// Sets a running node's load.
    pub fn set_load(&mut self, host: HostIx, load: Load) {
        if let Some(machines) = &mut self.hosts[host].machines {
            machines.swim.set_load(load);
        }
    }

    /// Stops a process without killing it: its kernel still takes in what comes.
    pub fn pause(&mut self, host: HostIx) {
        self.hosts[host].paused = true;
        self.hosts[host].disturbed = true;
    }

    /// Lets a paused process go on. What waited for it comes in at once, its timers among it.
    pub fn resume(&mut self, host: HostIx) {
        self.hosts[host].paused = false;
        let mut backlog = std::mem::take(&mut self.hosts[host].backlog);
        backlog.retain(|input| !matches!(input, Input::Timeout));
        let timers_at = self.rng.usize(0..=backlog.len());
        backlog.insert(timers_at, Input::Timeout);
        for input in backlog {
            self.step(host, input);
        }
    }

    /// Cuts every link between two groups, both ways.
    pub fn partition(&mut self, left: &[HostIx], right: &[HostIx]) {
        for &a in left {
            for &b in right {
                self.cut(a, b);
                self.cut(b, a);
            }
        }
    }

    /// Cuts one link one way.
    pub fn cut(&mut self, from: HostIx, to: HostIx) {
        self.network.block(from, to);
        self.hosts[from].disturbed = true;
        self.hosts[to].disturbed = true;
    }

    /// Lets healthy members be called dead: for runs whose faults leave no other way.
    pub fn allow_false_deaths(&mut self) {
        self.false_deaths_allowed = true;
    }

    /// Whether healthy members may be called dead in this run.
    pub fn false_deaths_allowed(&self) -> bool {
        self.false_deaths_allowed
    }

    /// Ends every fault: links are whole and fast, stopped processes go on. What is left to mend is
    /// left to the nodes.
    pub fn calm(&mut self) {
        self.network.faults = Faults::none();
        self.network.unblock_all();
        for host in 0..self.hosts.len() {
            if self.hosts[host].paused {
                self.resume(host);
            }
        }
    }

    /// The virtual time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Every host, up or down.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The settings of every node.
    pub fn config(&self) -> &SwimConfig {
        &self.config
    }

    /// Datagrams sent so far.
    pub fn datagrams(&self) -> u64 {
        self.datagrams
    }

    /// A digest of every step so far: equal for equal runs.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether a host's process is stopped.
    pub fn is_paused(&self, host: HostIx) -> bool {
        self.hosts[host].paused
    }

    /// Lets `time` pass.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.queue.first_key_value().map(|((at, _), _)| *at)
            && at <= end
        {
            self.advance();
        }
        self.now = end;
    }

    /// Lets time pass until `condition` holds, looked at every tenth of a period, for at most
    /// `limit`; returns how long it took.
    pub fn run_until(
        &mut self,
        limit: Duration,
        mut condition: impl FnMut(&Self) -> bool,
    ) -> Option<Duration> {
        let start = self.now;
        while !condition(self) {
            if self.now >= start + limit {
                return None;
            }
            self.run_for(self.config.protocol_period / 10);
        }
        Some(self.now.saturating_since(start))
    }

    fn advance(&mut self) {
        let Some(((at, _), event)) = self.queue.pop_first() else { return };
        self.now = at;
        match event {
            Event::Input { host, boot, input } => {
                if self.hosts[host].boot == boot {
                    self.deliver(host, input);
                }
            }
            Event::Datagram { host, from, datagram } => {
                self.deliver(host, Input::Datagram(from, datagram));
            }
            Event::Wake { host, sequence } => {
                let it = &mut self.hosts[host];
                if it.wake.is_some_and(|(_, awaited)| awaited == sequence) {
                    it.wake = None;
                    self.deliver(host, Input::Timeout);
                }
            }
            Event::Connect { stream } => self.connect(stream),
            Event::Answered { stream, answer } => {
                if let Some(stream) = self.streams.remove(&stream)
                    && self.hosts[stream.from].boot == stream.from_boot
                {
                    self.deliver(stream.from, Input::Answer(stream.waiter, answer));
                }
            }
        }
    }

    pub(super) fn deliver(&mut self, host: HostIx, input: Input) {
        let it = &mut self.hosts[host];
        if !it.paused {
            self.step(host, input);
        } else if !matches!(input, Input::Datagram(..)) || it.backlog.len() < SOCKET_BUFFER {
            it.backlog.push_back(input);
        }
    }

    /// One input to one host; then its outputs are carried out and the invariants looked at.
    fn step(&mut self, host: HostIx, input: Input) {
        let it = &mut self.hosts[host];
        let clock = it.clock;
        let Some(machines) = &mut it.machines else { return };
        machines.handle(self.now + clock, input);
        let outputs: Vec<Output> = std::iter::from_fn(|| machines.poll_output()).collect();
        let mut invariants = std::mem::take(&mut self.invariants);
        for invariant in &mut invariants {
            let step = Step { world: self, host, outputs: &outputs };
            if let Err(broken) = invariant.check(&step) {
                panic!(
                    "{} at {} us on {}: {broken}",
                    invariant.name(),
                    self.now.as_micros(),
                    self.hosts[host].id
                );
            }
        }
        self.invariants = invariants;
        for output in outputs {
            self.carry_out(host, output);
        }
        self.set_wake(host);
    }

    fn set_wake(&mut self, host: HostIx) {
        let it = &self.hosts[host];
        let Some(machines) = &it.machines else { return };
        let Some(due) = machines.poll_timeout().map(|at| (at - it.clock).max(self.now)) else {
            return;
        };
        if it.wake.is_none_or(|(at, _)| at > due) {
            let late = within(&mut self.rng, &self.network.faults.timer);
            let sequence = self.sequence + 1;
            self.hosts[host].wake = Some((due, sequence));
            let after = late + due.saturating_since(self.now);
            self.schedule(after, Event::Wake { host, sequence });
        }
    }

    pub(super) fn schedule(&mut self, after: Duration, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), event);
    }

    fn carry_out(&mut self, host: HostIx, output: Output) {
        match output {
            Output::Datagram(to, message) => self.send(host, to, &message),
            Output::Mail(mail) => self.post(host, mail),
            Output::Ask(waiter, to, ask) => self.dial(host, waiter, &to, &ask),
            Output::Answer(stream, answer) => self.answer(host, stream, answer),
            Output::Event(event) => self.hosts[host].events.push((self.now, event)),
            Output::Load(_) => {}
            Output::Register(at_least) => {
                let id = self.hosts[host].id.clone();
                let generation = self.register(&id, at_least);
                let boot = self.hosts[host].boot;
                let input = Input::Registered(generation);
                let takes = within(&mut self.rng, &self.network.faults.delay);
                self.schedule(takes, Event::Input { host, boot, input });
            }
            // Joined is for those who wait at the start of a node; here convergence is what counts.
            Output::Joined => {}
            Output::Fenced(by) => self.end(host, End::Fenced(by)),
            Output::Refused(holder) => self.end(host, End::Refused(holder)),
            Output::SeedUnreachable(seed) => self.hosts[host].seeds_down.push(seed),
        }
    }

    fn end(&mut self, host: HostIx, end: End) {
        self.crash(host);
        self.hosts[host].end = Some(end);
    }

    pub(super) fn host_at(&self, addr: SocketAddr) -> Option<HostIx> {
        self.hosts.iter().position(|host| host.addr == addr)
    }

    fn send(&mut self, host: HostIx, to: SocketAddr, message: &[u8]) {
        let bytes = datagram::seal(self.mesh, message);
        assert!(bytes.len() <= DATAGRAM_BYTES_MAX, "a datagram of {} bytes", bytes.len());
        self.datagrams += 1;
        self.digest =
            xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, self.digest) ^ self.now.as_micros();
        let Some(receiver) = self.host_at(to) else { return };
        let from = self.hosts[host].addr;
        for delay in self.network.datagram(&mut self.rng, host, receiver) {
            let datagram = datagram::open(self.mesh, &bytes).expect("what was sealed opens");
            self.schedule(delay, Event::Datagram { host: receiver, from, datagram });
        }
    }

    fn post(&mut self, host: HostIx, mail: Mail) {
        let takes = within(&mut self.rng, &self.network.faults.mailbox);
        let it = &mut self.hosts[host];
        let at = (self.now + takes).max(it.mailbox_free);
        it.mailbox_free = at;
        let boot = it.boot;
        let input = Input::Mail(mail);
        self.schedule(at.saturating_since(self.now), Event::Input { host, boot, input });
    }
}

fn address(index: usize) -> SocketAddr {
    let ip = std::net::Ipv4Addr::from(0x0a00_0000 + u32::try_from(index).expect("few hosts"));
    SocketAddr::new(ip.into(), 7946)
}
