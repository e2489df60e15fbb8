//! What a node is built from, checked before anything is started.

use std::net::SocketAddr;
use std::time::Duration;

use meshwork_protocol::id::{NameError, NodeId};
use meshwork_protocol::lease::LeaseConfig;
use meshwork_protocol::limits::{
    DEQUE_CAPACITY_MAX, SEEDS_MAX, STEAL_BATCH_MAX, STEAL_RATE_MAX, VIRTUAL_NODES_MAX,
};
use meshwork_protocol::swim::config::SwimConfig;

/// Everything that can be set, with the defaults of the text.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) id: String,
    pub(crate) mesh_name: String,
    pub(crate) bind: String,
    pub(crate) steal_bind: Option<String>,
    pub(crate) advertise: Option<String>,
    pub(crate) insecure: bool,
    pub(crate) seeds: Vec<String>,
    pub(crate) slots: usize,
    pub(crate) buffer: usize,
    pub(crate) steal_threshold: usize,
    pub(crate) max_steal_batch: usize,
    pub(crate) steal_rate_limit: u32,
    pub(crate) stealing: bool,
    pub(crate) virtual_nodes: u32,
    pub(crate) poll_interval: Duration,
    pub(crate) lease_term: Duration,
    pub(crate) swim: SwimConfig,
}

impl Config {
    pub(crate) fn new(id: &str) -> Self {
        Self {
            id: id.into(),
            mesh_name: "meshwork".into(),
            bind: "127.0.0.1:0".into(),
            steal_bind: None,
            advertise: None,
            insecure: false,
            seeds: Vec::new(),
            slots: std::thread::available_parallelism().map_or(4, usize::from),
            buffer: 64,
            steal_threshold: 2,
            max_steal_batch: 16,
            steal_rate_limit: 10,
            stealing: true,
            virtual_nodes: 150,
            poll_interval: Duration::from_secs(1),
            lease_term: LeaseConfig::default().term(),
            swim: SwimConfig::default(),
        }
    }

    /// Checks everything that can be checked without the network.
    pub(crate) fn check(&self) -> Result<Checked, ConfigError> {
        let id = NodeId::new(&self.id).map_err(ConfigError::Id)?;
        let bind = address("bind", &self.bind)?;
        let steal_bind = match &self.steal_bind {
            Some(text) => address("steal_bind", text)?,
            None => SocketAddr::new(bind.ip(), 0),
        };
        let advertise =
            self.advertise.as_deref().map(|text| address("advertise", text)).transpose()?;
        for (what, addr) in [("bind", bind), ("steal_bind", steal_bind)] {
            if !addr.ip().is_loopback() && !self.insecure {
                return Err(ConfigError::NotLoopback { what, addr });
            }
        }
        if bind.ip().is_unspecified() && advertise.is_none() {
            return Err(ConfigError::NothingToAdvertise(bind));
        }
        if let Some(advertise) = advertise
            && advertise.ip().is_unspecified()
        {
            return Err(ConfigError::NothingToAdvertise(advertise));
        }
        for seed in &self.seeds {
            check_seed(seed)?;
        }
        let range = |what, value: usize, min: usize, max: usize| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::OutOfRange { what, value: value as u64, min, max })
            }
        };
        range("slots", self.slots, 0, 1 << 16)?;
        range("buffer", self.buffer, 1, DEQUE_CAPACITY_MAX)?;
        range("steal_threshold", self.steal_threshold, 0, self.buffer)?;
        range("max_steal_batch", self.max_steal_batch, 1, STEAL_BATCH_MAX)?;
        range("virtual_nodes", self.virtual_nodes as usize, 1, VIRTUAL_NODES_MAX as usize)?;
        range("steal_rate_limit", self.steal_rate_limit as usize, 0, STEAL_RATE_MAX as usize)?;
        range("seeds", self.seeds.len(), 0, SEEDS_MAX)?;
        if self.poll_interval < Duration::from_millis(10) {
            return Err(ConfigError::PollIntervalTooShort(self.poll_interval));
        }
        let lease = LeaseConfig::with_term(self.lease_term)
            .map_err(|e| ConfigError::Other(format!("lease_term: {e}")))?;
        self.swim.validate().map_err(|e| ConfigError::Other(e.to_string()))?;
        Ok(Checked { id, bind, steal_bind, advertise, lease })
    }
}

/// The parts of a configuration that were text.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) id: NodeId,
    pub(crate) bind: SocketAddr,
    pub(crate) steal_bind: SocketAddr,
    pub(crate) advertise: Option<SocketAddr>,
    pub(crate) lease: LeaseConfig,
}

/// What is wrong with a configuration. Nothing was started.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The node id.
    #[error("node id: {0}")]
    Id(NameError),
    /// An address.
    #[error("{what}: `{text}` is not an address with a port, like 127.0.0.1:7946 or [::1]:7946")]
    Address {
        /// Which.
        what: &'static str,
        /// What was given.
        text: String,
    },
    /// A seed.
    #[error("seed: `{0}` is not a host with a port, like node-1:7946 or [::1]:7946")]
    Seed(String),
    /// An address that others can reach, without a key.
    #[error(
        "{what}: {addr} is not a loopback address, and the mesh has no key: whoever reaches it \
         could join; call `.insecure()` (or pass --insecure) if the network is trusted"
    )]
    NotLoopback {
        /// Which.
        what: &'static str,
        /// What was given.
        addr: SocketAddr,
    },
    /// Bound to every address, and none to tell others.
    #[error("{0} is no address that others can reach: say which one with `advertise`")]
    NothingToAdvertise(SocketAddr),
    /// A number.
    #[error("{what} is {value}, must be {min} to {max}")]
    OutOfRange {
        /// Which.
        what: &'static str,
        /// What was given.
        value: u64,
        /// At least.
        min: usize,
        /// At most.
        max: usize,
    },
    /// The store would be asked without a pause.
    #[error("poll_interval is {0:?}, must be at least 10 ms")]
    PollIntervalTooShort(Duration),
    /// Something else, named in the text.
    #[error("{0}")]
    Other(String),
}

fn address(what: &'static str, text: &str) -> Result<SocketAddr, ConfigError> {
    text.parse().map_err(|_| ConfigError::Address { what, text: text.into() })
}

/// A seed is an address or a host with a port. Names are resolved when they are dialled.
pub(crate) fn check_seed(text: &str) -> Result<(), ConfigError> {
    if text.parse::<SocketAddr>().is_ok_and(|addr| addr.port() != 0) {
        return Ok(());
    }
    let wrong = || ConfigError::Seed(text.into());
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let visible = !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']);
    let port_is_fine = port.parse::<u16>().is_ok_and(|port| port != 0);
    if visible && port_is_fine { Ok(()) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut Config)) -> String {
        let mut config = Config::new("a");
        change(&mut config);
        config.check().map_or_else(|e| e.to_string(), |_| "fine".into())
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(check(|_| {}), "fine");
        assert_eq!(
            check(|c| c.id = "a b".into()),
            "node id: a name is visible text without spaces, this one has ' '"
        );
        assert!(check(|c| c.bind = "localhost".into()).starts_with("bind: `localhost` is not"));
        assert!(check(|c| c.bind = "0.0.0.0:1".into()).contains("not a loopback address"));
        let open = |c: &mut Config| {
            c.bind = "0.0.0.0:1".into();
            c.insecure = true;
        };
        assert!(check(open).contains("`advertise`"));
        assert_eq!(
            check(|c| {
                open(c);
                c.advertise = Some("10.0.0.1:1".into());
            }),
            "fine"
        );
        assert_eq!(check(|c| c.slots = 1 << 17), "slots is 131072, must be 0 to 65536");
        assert!(check(|c| c.max_steal_batch = 0).starts_with("max_steal_batch is 0"));
    }

    #[test]
    fn seeds_are_hosts_with_ports() {
        for good in ["127.0.0.1:7946", "[::1]:7946", "node-1:7946", "node.example.org:1"] {
            assert!(check_seed(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "node",
            ":7946",
            "node:",
            "node:0",
            "node:99999",
            "::1:7946",
            "127.0.0.1:0",
            "http://a:1",
        ] {
            assert!(check_seed(bad).is_err(), "{bad}");
        }
    }
}
