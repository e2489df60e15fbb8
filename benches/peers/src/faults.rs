//! The faults of flexiq-mesh 2.1.0 that the README names, each shown on its public API.
//!
//! A fault that no longer shows makes the run fail, so the README cannot outlive a fix unnoticed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flexiq_mesh::MeshConfig;
use flexiq_mesh::state::{Member, MemberState};
use flexiq_mesh::steal::protocol::{StealRequest, StealResponse, read_frame, write_frame};
use flexiq_mesh::swim::membership::Membership;
use flexiq_mesh::swim::message::{GossipMessage, MemberUpdate};
use tokio::net::{TcpStream, UdpSocket};

use crate::peer::{PeerMesh, config, job, member};
use crate::scenario::{Ports, fresh_ports, node_name, wait_until};

/// The peer's receive buffer for gossip; what is longer arrives cut and is dropped.
const RECEIVE_BUFFER_BYTES: usize = 2_048;

/// What a fault looked like, or what was seen in its place.
struct Finding {
    shown: bool,
    saw: String,
}

type Fault = (&'static str, fn() -> Result<Finding>);

const FAULTS: &[Fault] = &[
    ("the ACK carries every peer", ack_outgrows_the_buffer),
    ("an update is sent once", update_is_sent_once),
    ("join is sent once", join_is_sent_once),
    ("a seed given by host name is ignored", hostname_seed_is_ignored),
    ("an advertised address with a port parses to 0.0.0.0", advertised_port_is_unspecified),
    ("one shutdown ends one of two loops", shutdown_ends_one_loop),
    ("after a leave the same id is not readmitted", leaver_is_not_readmitted),
    ("jobs are popped before the reply is written", vanished_thief_takes_jobs_along),
    ("a reply over 1 MiB cannot be read", large_reply_is_lost),
    ("the rate limit trusts the name and size that the caller gives", caller_names_itself),
    ("XOR: one known datagram gives the key away", datagram_gives_the_key_away),
];

/// Shows every fault, one a line.
pub(crate) fn run() -> Result<()> {
    let mut gone = 0;
    for &(name, show) in FAULTS {
        let finding = show().with_context(|| name.to_owned())?;
        println!("{}  {name}: {}", if finding.shown { "shown" } else { "GONE " }, finding.saw);
        gone += u32::from(!finding.shown);
    }
    ensure!(gone == 0, "{gone} faults do not show any more");
    Ok(())
}

fn ack_outgrows_the_buffer() -> Result<Finding> {
    let short = |index: usize| node_name(index);
    let uuid = |index: usize| format!("01890a5d-ac96-774b-bcce-b302099a{index:04}");
    let (short_fit, uuid_fit) = (updates_that_fit(short)?, updates_that_fit(uuid)?);
    Ok(Finding {
        shown: short_fit < 24 && uuid_fit < 16,
        saw: format!(
            "with ids of 7 bytes 64 updates are {} B, with UUIDs {} B; of the {RECEIVE_BUFFER_BYTES} B that are read, {short_fit} and {uuid_fit} fit",
            ack_bytes(64, short)?,
            ack_bytes(64, uuid)?
        ),
    })
}

/// The most updates of one ACK that arrive whole.
fn updates_that_fit(name: fn(usize) -> String) -> Result<usize> {
    let mut updates = 0;
    while ack_bytes(updates + 1, name)? <= RECEIVE_BUFFER_BYTES {
        updates += 1;
    }
    Ok(updates)
}

/// The size of an ACK that carries `updates` members.
fn ack_bytes(updates: usize, name: fn(usize) -> String) -> Result<usize> {
    let ack = GossipMessage::Ack { seq: 1, from: name(0) };
    Ok(ack.with_updates((0..updates).map(|index| alive(&name(index))).collect()).encode()?.len())
}

fn update_is_sent_once() -> Result<Finding> {
    let mut membership = Membership::new(node_name(0));
    membership.queue_update(alive(&node_name(1)));
    let (first, second) = (membership.take_updates().len(), membership.take_updates().len());
    Ok(Finding {
        shown: (first, second) == (1, 0),
        saw: format!("{first} in the first datagram, {second} in the second"),
    })
}

fn join_is_sent_once() -> Result<Finding> {
    let ports = fresh_ports(2)?;
    let mut mesh = PeerMesh::empty()?;
    mesh.add(&node_name(1), config(ports[1], vec![ports[0].gossip_address().to_string()]));
    mesh.await_answer(ports[1])?;
    mesh.add(&node_name(0), config(ports[0], Vec::new()));
    never_meet(mesh, "its seed started just after it")
}

fn hostname_seed_is_ignored() -> Result<Finding> {
    let ports = fresh_ports(2)?;
    let mut mesh = PeerMesh::empty()?;
    mesh.add(&node_name(0), config(ports[0], Vec::new()));
    mesh.await_answer(ports[0])?;
    mesh.add(&node_name(1), config(ports[1], vec![format!("localhost:{}", ports[0].gossip)]));
    never_meet(mesh, "its seed is localhost and a port")
}

/// Shown when two nodes do not see each other in thirty periods.
fn never_meet(mesh: PeerMesh, why: &str) -> Result<Finding> {
    let limit = Duration::from_secs(3);
    let met = mesh.runtime.block_on(wait_until(Instant::now(), limit, || {
        mesh.nodes.iter().any(|node| node.state().alive_count() > 0)
    }));
    mesh.stop()?;
    Ok(Finding {
        shown: met.is_none(),
        saw: match met {
            Some(after) => format!("{why}; they met after {after:?}"),
            None => format!("{why}; they did not meet in {limit:?}"),
        },
    })
}

fn advertised_port_is_unspecified() -> Result<Finding> {
    let advertise_addr = "10.0.0.7:7946".to_owned();
    let parsed =
        MeshConfig { advertise_addr: Some(advertise_addr.clone()), ..MeshConfig::default() }
            .advertise_ip();
    Ok(Finding {
        shown: parsed.is_unspecified(),
        saw: format!("{advertise_addr}, the form that its documentation shows, is {parsed}"),
    })
}

fn shutdown_ends_one_loop() -> Result<Finding> {
    let (mesh, started) = PeerMesh::start(5)?;
    ensure!(mesh.all_see_all(started).is_some(), "5 nodes did not find each other");
    mesh.nodes.iter().for_each(|node| node.request_shutdown());
    mesh.runtime.block_on(async { tokio::time::sleep(Duration::from_secs(2)).await });
    let gossiping = mesh.loops.iter().filter(|loops| !loops.gossip.is_finished()).count();
    let serving = mesh.loops.iter().filter(|loops| !loops.steal.is_finished()).count();
    mesh.stop()?;
    Ok(Finding {
        shown: gossiping + serving == 5,
        saw: format!(
            "of 5 nodes told to stop, after 2 s {gossiping} still gossip and {serving} still serve steals"
        ),
    })
}

fn leaver_is_not_readmitted() -> Result<Finding> {
    let (mut mesh, started) = PeerMesh::start(3)?;
    ensure!(mesh.all_see_all(started).is_some(), "3 nodes did not find each other");
    let leaver = node_name(2);
    let sees = |mesh: &PeerMesh, state| {
        mesh.nodes[..2].iter().all(|node| {
            node.state().get_member(&leaver).is_some_and(|member| member.state == state)
        })
    };

    // Twice, because one of its two loops takes the first.
    mesh.nodes[2].request_shutdown();
    mesh.nodes[2].request_shutdown();
    let left = mesh.runtime.block_on(wait_until(Instant::now(), Duration::from_secs(2), || {
        sees(&mesh, MemberState::Left)
    }));
    ensure!(left.is_some(), "the leave did not arrive");

    let ports = fresh_ports(1)?[0];
    let seed = mesh.nodes[0].config().gossip_port;
    mesh.add(&leaver, config(ports, vec![format!("127.0.0.1:{seed}")]));
    let limit = Duration::from_secs(8);
    let back = mesh
        .runtime
        .block_on(wait_until(Instant::now(), limit, || sees(&mesh, MemberState::Alive)));
    let others_seen = mesh.nodes[3].state().alive_count();
    mesh.stop()?;
    Ok(Finding {
        shown: back.is_none(),
        saw: match back {
            Some(after) => format!("alive again to both others after {after:?}"),
            None => format!(
                "it sees {others_seen} others, and after {limit:?} they still do not both have it alive"
            ),
        },
    })
}

fn vanished_thief_takes_jobs_along() -> Result<Finding> {
    let victim = Victim::with_jobs(20, 0)?;
    victim.mesh.runtime.block_on(async {
        let mut stream = TcpStream::connect(("127.0.0.1", victim.ports.steal)).await?;
        write_frame(&mut stream, &request("vanishing", 4)?).await?;
        drop(stream);
        let limit = Duration::from_secs(2);
        wait_until(Instant::now(), limit, || victim.buffered() < 20)
            .await
            .context("the victim did not hear the request")
    })?;
    let left = victim.buffered();
    victim.mesh.stop()?;
    Ok(Finding {
        shown: left == 16,
        saw: format!(
            "a thief asked for 4 of 20 jobs and closed its socket; the victim has {left}, nobody the rest"
        ),
    })
}

fn large_reply_is_lost() -> Result<Finding> {
    let mut victim = Victim::with_jobs(20, 300 * 1024)?;
    let ports = fresh_ports(1)?[0];
    victim.mesh.add("thief", config(ports, Vec::new()));
    let mut target = member("victim", victim.ports);
    target.info.local_buffer_len = 20;
    let thief = victim.mesh.nodes[1].clone();
    thief.state().upsert_member(target);
    let stolen = victim.mesh.runtime.block_on(thief.try_steal());
    let left = victim.buffered();
    victim.mesh.stop()?;
    Ok(Finding {
        shown: stolen == 0 && left == 16,
        saw: format!(
            "of 20 jobs of 300 KiB a thief asked for 4; it has {stolen}, the victim {left}, nobody the rest"
        ),
    })
}

fn caller_names_itself() -> Result<Finding> {
    let victim = Victim::with_jobs(60, 0)?;
    let (mut as_one, mut as_many) = (0, 0);
    for _ in 0..15 {
        as_one += victim.surrendered_to("one-name", 1)?;
    }
    for i in 0..15 {
        as_many += victim.surrendered_to(&format!("name-{i}"), 1)?;
    }
    let rest = victim.buffered();
    let at_once = victim.surrendered_to("greedy", 1_000)?;
    victim.mesh.stop()?;
    Ok(Finding {
        shown: as_one < 15 && as_many == 15 && at_once == rest,
        saw: format!(
            "15 requests under one name got {as_one} jobs, under 15 names {as_many}; one request for 1,000 took all {at_once} left"
        ),
    })
}

fn datagram_gives_the_key_away() -> Result<Finding> {
    let ports = fresh_ports(1)?[0];
    let mut mesh = PeerMesh::empty()?;
    let listener = mesh.runtime.block_on(UdpSocket::bind("127.0.0.1:0"))?;
    let encrypted = MeshConfig {
        encryption_key: Some("t7Jl3k9Qb0u2mYx5Wf8Zc1Rr6Hn4Vd+Ga/EoTiPsLjM=".to_owned()),
        ..config(ports, vec![listener.local_addr()?.to_string()])
    };
    let key = encrypted.decoded_encryption_key().context("the key is not base64")?;
    mesh.add(&node_name(0), encrypted);

    let mut datagram = [0; RECEIVE_BUFFER_BYTES];
    let limit = Duration::from_secs(2);
    let length = mesh
        .runtime
        .block_on(async { tokio::time::timeout(limit, listener.recv(&mut datagram)).await })??;
    // The join's first bytes are its kind, its number and the sender's name and address.
    let ping =
        GossipMessage::Ping { seq: 1, from: node_name(0), from_addr: ports.gossip_address() };
    let known = ping.with_updates(vec![alive(&node_name(0))]).encode()?;
    let recovered: Vec<u8> = datagram[..length]
        .iter()
        .zip(&known)
        .take(key.len())
        .map(|(sealed, clear)| sealed ^ clear)
        .collect();
    mesh.stop()?;
    Ok(Finding {
        shown: recovered == key,
        saw: format!("{} of {} key bytes out of one join", matching(&recovered, &key), key.len()),
    })
}

/// A node with jobs, whose steal port answers.
struct Victim {
    mesh: PeerMesh,
    ports: Ports,
}

impl Victim {
    fn with_jobs(jobs: usize, payload_bytes: usize) -> Result<Self> {
        let ports = fresh_ports(1)?[0];
        let mut mesh = PeerMesh::empty()?;
        mesh.add("victim", config(ports, Vec::new()));
        mesh.await_answer(ports)?;
        mesh.nodes[0].prefetch(
            (0..jobs).map(|i| job(&format!("job-{i}"), vec![0; payload_bytes])).collect(),
        );
        let victim = Self { mesh, ports };
        // Answered once, its listener is bound.
        victim.surrendered_to("probe", 0)?;
        Ok(victim)
    }

    fn buffered(&self) -> usize {
        self.mesh.nodes[0].local_len()
    }

    /// How many jobs a caller that calls itself `thief` gets when it asks for `max_count`.
    fn surrendered_to(&self, thief: &str, max_count: usize) -> Result<usize> {
        self.mesh.runtime.block_on(async {
            let mut stream = TcpStream::connect(("127.0.0.1", self.ports.steal)).await?;
            write_frame(&mut stream, &request(thief, max_count)?).await?;
            let reply: StealResponse = bincode::deserialize(&read_frame(&mut stream).await?)?;
            Ok(reply.jobs.len())
        })
    }
}

fn request(thief: &str, max_count: usize) -> Result<Vec<u8>> {
    Ok(bincode::serialize(&StealRequest { thief_id: thief.to_owned(), max_count })?)
}

/// The update that says that `name` is alive.
fn alive(name: &str) -> MemberUpdate {
    let Member { info, state, incarnation } = member(name, Ports { gossip: 7946, steal: 7947 });
    MemberUpdate { member_id: info.worker_id.clone(), state, incarnation, info }
}

fn matching(left: &[u8], right: &[u8]) -> usize {
    left.iter().zip(right).filter(|(left, right)| left == right).count()
}
