//! What both sides are asked to do: one set of figures, one way to wait, one way to take ports.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// The sizes of mesh that must converge.
pub(crate) const CONVERGE_NODES: [usize; 4] = [5, 16, 32, 64];
/// How long a mesh may take before it counts as never.
pub(crate) const CONVERGE_LIMIT: Duration = Duration::from_secs(12);
/// The probe period of every node.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);

/// The size of the mesh that steals: one node has the work, the others have none.
pub(crate) const STEAL_NODES: usize = 5;
/// Jobs on the one node. They stay unfinished, so only a steal moves them.
pub(crate) const STEAL_JOBS: usize = 60;
/// How long the idle nodes may steal.
pub(crate) const STEAL_WINDOW: Duration = Duration::from_secs(10);

/// How often a scenario looks at the nodes, and so the resolution of what it reports.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The name of the `index`th node, the same on both sides.
pub(crate) fn node_name(index: usize) -> String {
    format!("node-{index:02}")
}

/// Looks until `done` or until `limit` has passed since `since`; the time it took, or `None`.
pub(crate) async fn wait_until(
    since: Instant,
    limit: Duration,
    mut done: impl FnMut() -> bool,
) -> Option<Duration> {
    loop {
        if done() {
            return Some(since.elapsed());
        }
        if since.elapsed() >= limit {
            return None;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The ports of one node: the UDP port of its gossip and the TCP port of its steals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) gossip: u16,
    pub(crate) steal: u16,
}

impl Ports {
    /// The address that the others ping.
    pub(crate) fn gossip_address(self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.gossip))
    }

    fn bind(gossip: u16, steal: u16) -> std::io::Result<(UdpSocket, TcpListener)> {
        Ok((
            UdpSocket::bind((Ipv4Addr::LOCALHOST, gossip))?,
            TcpListener::bind((Ipv4Addr::LOCALHOST, steal))?,
        ))
    }
}

/// Ports for `nodes` nodes that nobody on this machine had a moment ago.
///
/// All are held until the last is found, so no two are the same.
pub(crate) fn fresh_ports(nodes: usize) -> anyhow::Result<Vec<Ports>> {
    let held: Vec<_> = (0..nodes)
        .map(|_| Ports::bind(0, 0))
        .collect::<Result<_, _>>()
        .context("no free ports on loopback")?;
    held.iter()
        .map(|(gossip, steal)| {
            Ok(Ports { gossip: gossip.local_addr()?.port(), steal: steal.local_addr()?.port() })
        })
        .collect()
}

/// Fails unless every one of `ports` can be bound again.
pub(crate) fn ensure_free(ports: &[Ports]) -> anyhow::Result<()> {
    for &ports in ports {
        ensure!(
            Ports::bind(ports.gossip, ports.steal).is_ok(),
            "a stopped node still holds one of {ports:?}"
        );
    }
    Ok(())
}
