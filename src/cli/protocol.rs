//! What a node is asked and says, one JSON object a line: over a demo node's pipes, and over any
//! node's Unix socket.
//!
//! Each request is answered once, with its number; what a watcher is told has none. Times are
//! microseconds of the machine's boot clock, which all its processes share.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use meshwork::protocol::id::{Generation, JobId, NodeId};
use meshwork::protocol::job::Recorded;
use meshwork::protocol::load::Load;
use meshwork::protocol::swim::Member;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A line to a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Comes back with the answer.
    #[serde(default)]
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) request: Request,
}

/// What a node can be asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Accept these jobs, all or none.
    Enqueue { jobs: Vec<JobRequest> },
    /// What the node sees and does.
    Status,
    /// Say what happens from now on.
    Watch,
    /// Join the mesh; for a node of the demo, once.
    Start { peers: Vec<Peer>, seeds: Vec<String> },
}

/// A job to accept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRequest {
    /// Made by the caller, so that a repeated request stores nothing twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<JobId>,
    pub(crate) handler: String,
    pub(crate) arguments: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
}

/// A node of the demo, and the region that it stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(crate) region: String,
    pub(crate) gossip: SocketAddr,
    pub(crate) steal: SocketAddr,
}

/// A line from a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum Said {
    /// A demo node has its sockets and its store, and waits for `start`.
    Ready { id: NodeId, gossip: SocketAddr, steal: SocketAddr },
    /// Answers `start`.
    Started { re: u64 },
    /// Answers `enqueue`: all are stored.
    Enqueued { re: u64, accepted: u32, duplicates: u32 },
    /// Answers `status`.
    Status { re: u64, status: Box<Status> },
    /// Answers `watch`.
    Watching { re: u64 },
    /// Answers what could not be done; nothing was.
    Error { re: u64, message: String, retryable: bool },
    /// To a watcher: who is present now, and what changed.
    Membership { at_us: u64, change: Change, member: Option<NodeId>, present: u32 },
    /// To a watcher: what happened to jobs, in order.
    Jobs { events: Vec<JobNews> },
    /// To a watcher: it did not keep up, and so many events were not told.
    Missed { events: u64 },
    /// To a watcher: the node has stopped, for this reason.
    Stopped { reason: String },
}

/// A change of the membership, as one node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Snapshot,
    Joined,
    Updated,
    Suspected,
    Recovered,
    Died,
    Left,
}

/// Something that happened to jobs on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(crate) enum JobNews {
    Started {
        at_us: u64,
        job: JobId,
        attempt: u32,
        stolen: bool,
    },
    Ended {
        at_us: u64,
        job: JobId,
        attempt: u32,
        stolen: bool,
        ran_us: u64,
        /// None when the job is to be tried again.
        recorded: Option<Recorded>,
        error: Option<String>,
    },
    Stolen {
        at_us: u64,
        from: NodeId,
        jobs: u32,
    },
    Requeued {
        at_us: u64,
        from: NodeId,
        buffered: Vec<JobId>,
        interrupted: Vec<JobId>,
    },
}

/// What a node sees and does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) id: NodeId,
    pub(crate) generation: Generation,
    pub(crate) gossip: SocketAddr,
    pub(crate) steal: SocketAddr,
    /// Dead members and those that left included, while they are remembered.
    pub(crate) members: Vec<Member>,
    pub(crate) load: Load,
    pub(crate) counters: BTreeMap<String, u64>,
    /// The jobs of the store by state; none when the store does not answer.
    pub(crate) store: Option<BTreeMap<String, u64>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both_ways<T>(value: &T, line: &str)
    where
        T: Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
    {
        assert_eq!(serde_json::to_string(value).unwrap(), line);
        assert_eq!(&serde_json::from_str::<T>(line).unwrap(), value);
    }

    #[test]
    fn requests_read_as_they_are_written() {
        both_ways(&Asked { id: 7, request: Request::Status }, r#"{"id":7,"request":"status"}"#);
        let job = JobRequest {
            id: Some(JobId::from_bytes([1; 16])),
            handler: "digest".into(),
            arguments: serde_json::json!({"path": "a"}),
            key: None,
        };
        both_ways(
            &Asked { id: 1, request: Request::Enqueue { jobs: vec![job] } },
            r#"{"id":1,"request":"enqueue","jobs":[{"id":"01010101-0101-0101-0101-010101010101","handler":"digest","arguments":{"path":"a"}}]}"#,
        );
        let peer = Peer {
            region: "us-east-1".into(),
            gossip: "127.0.0.1:1".parse().unwrap(),
            steal: "127.0.0.1:2".parse().unwrap(),
        };
        both_ways(
            &Asked {
                id: 2,
                request: Request::Start { peers: vec![peer], seeds: vec!["127.0.0.1:1".into()] },
            },
            r#"{"id":2,"request":"start","peers":[{"region":"us-east-1","gossip":"127.0.0.1:1","steal":"127.0.0.1:2"}],"seeds":["127.0.0.1:1"]}"#,
        );
        let by_hand: Asked = serde_json::from_str(r#"{"request":"watch"}"#).unwrap();
        assert_eq!(by_hand, Asked { id: 0, request: Request::Watch });
    }

    #[test]
    fn what_a_node_says_reads_as_it_is_written() {
        both_ways(
            &Said::Ready {
                id: NodeId::new("a").unwrap(),
                gossip: "127.0.0.1:1".parse().unwrap(),
                steal: "[::1]:2".parse().unwrap(),
            },
            r#"{"say":"ready","id":"a","gossip":"127.0.0.1:1","steal":"[::1]:2"}"#,
        );
        both_ways(
            &Said::Membership {
                at_us: 5,
                change: Change::Died,
                member: Some(NodeId::new("b").unwrap()),
                present: 4,
            },
            r#"{"say":"membership","at_us":5,"change":"died","member":"b","present":4}"#,
        );
        both_ways(
            &Said::Jobs {
                events: vec![JobNews::Ended {
                    at_us: 9,
                    job: JobId::from_bytes([2; 16]),
                    attempt: 1,
                    stolen: true,
                    ran_us: 20_100,
                    recorded: Some(Recorded::Succeeded("1".into())),
                    error: None,
                }],
            },
            r#"{"say":"jobs","events":[{"what":"ended","at_us":9,"job":"02020202-0202-0202-0202-020202020202","attempt":1,"stolen":true,"ran_us":20100,"recorded":{"Succeeded":"1"},"error":null}]}"#,
        );
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        for line in ["", "1", "{}", r#"{"request":"dance"}"#, r#"{"request":"enqueue"}"#, "{"] {
            assert!(serde_json::from_str::<Asked>(line).is_err(), "{line}");
        }
    }
}
