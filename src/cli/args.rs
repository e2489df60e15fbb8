//! The command line: what can be said, and what is wrong with what was said.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, value_parser};
use meshwork::protocol::id::NodeId;

/// Jobs of a demo that was given no folder.
pub(crate) const JOBS_DEFAULT: u32 = 4_000;
/// Most jobs of one demo: the parent keeps a row of each in memory.
pub(crate) const JOBS_MAX: u32 = 1_000_000;

/// An actor system that shares work between the nodes of a mesh.
#[derive(Debug, Parser)]
#[command(
    name = "meshwork",
    version,
    about = "Shares work between the nodes of a mesh",
    long_about = "Shares work between the nodes of a mesh.\n\n\
                  Without a command it runs the demo: five nodes, each a process of its own, find \
                  each other, take skewed work, steal it level and finish it, with the database \
                  agreeing to the last row.",
    after_help = "Examples:\n  \
                  meshwork                              the demo, over the files of this folder\n  \
                  meshwork demo --kill us-east-1        the same, with a node killed in mid-run\n  \
                  meshwork node --id a --db jobs.db     one node, until it is interrupted\n  \
                  meshwork status a                     what that node sees and does\n  \
                  meshwork passes /run/app              who works in that directory, and at what",
    infer_subcommands = false
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run nodes on this machine, give them skewed work, and check what they did
    Demo(DemoArgs),
    /// Run one node until it is interrupted
    Node(NodeArgs),
    /// Show the members, the deque and the counters of a running node
    Status(StatusArgs),
    /// Show who submits and who runs passes in a directory, and how fast
    #[cfg(target_os = "linux")]
    Passes(PassesArgs),
    /// A node of the demo; the demo starts it
    #[command(hide = true)]
    DemoNode(DemoNodeArgs),
}

impl Command {
    /// What is run without a command.
    pub(crate) fn default_demo() -> Self {
        let cli = Cli::parse_from(["meshwork", "demo"]);
        cli.command.expect("a command was given")
    }
}

#[derive(Args, Clone, Debug)]
#[command(
    long_about = "Runs nodes on this machine, each a process of its own, gives them skewed work, \
                  and checks what they did.\n\n\
                  One `digest` job for each regular file under PATH: the XXH3-64 of its bytes, its \
                  size, its newlines. Links are not followed; `.git` and folders that hold a \
                  CACHEDIR.TAG are skipped. Four of five jobs go to the first two regions; the \
                  others steal. Between regions the network is as slow as the real one; the \
                  database, a file that all nodes share, is not.\n\n\
                  At the end every job must have exactly one outcome, every digest must equal one \
                  that is computed directly, and every row of the database must agree. The exit \
                  status is 0 only when that holds and no job failed, 1 otherwise, 2 when the \
                  command line is wrong, 130 when interrupted.",
    after_help = "Examples:\n  \
                  meshwork demo                               4,000 jobs over this folder's files\n  \
                  meshwork demo src --out digests.ndjson      one job a file, one line a job\n  \
                  meshwork demo --no-steal                    how long it takes without stealing\n  \
                  meshwork demo --kill us-east-1@50           SIGKILL a node at half of the work\n  \
                  meshwork demo --headless --json | jq        for programs"
)]
pub(crate) struct DemoArgs {
    /// Digest the files under this folder, or this one file [default: the current folder]
    pub(crate) path: Option<PathBuf>,

    /// Nodes to start, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = value_parser!(u8).range(1..=64))]
    pub(crate) nodes: u8,

    /// Jobs to enqueue, cycling through the files [default: 4000 without PATH, one a file with it]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = value_parser!(u32).range(1..=i64::from(JOBS_MAX)))]
    pub(crate) jobs: Option<u32>,

    /// Milliseconds that each job also waits, standing for the I/O that a real job does
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 20,
        allow_negative_numbers = true,
        value_parser = value_parser!(u32).range(0..=60_000)
    )]
    pub(crate) work_ms: u32,

    /// Turn the emulated latency between regions off
    #[arg(long)]
    pub(crate) no_latency: bool,

    /// Turn stealing off, to see how long it takes without
    #[arg(long)]
    pub(crate) no_steal: bool,

    /// SIGKILL this node when that share of the jobs is done [default share: 25]
    #[arg(long, value_name = "NODE[@PERCENT]", value_parser = parse_kill)]
    pub(crate) kill: Option<Kill>,

    /// Keep the database in this file
    #[arg(long, value_name = "FILE")]
    pub(crate) db: Option<PathBuf>,

    /// Write one line of JSON a job: seq, path, xxh3, bytes, lines, node, stolen
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// No progress bar and no lines while it runs
    #[arg(long)]
    pub(crate) headless: bool,

    /// Print the result as one JSON object on stdout; the rest goes to stderr
    #[arg(long)]
    pub(crate) json: bool,
}

/// Whom `--kill` kills, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kill {
    pub(crate) node: String,
    pub(crate) percent: u8,
}

fn parse_kill(text: &str) -> Result<Kill, String> {
    let (node, percent) = match text.rsplit_once('@') {
        None => (text, 25),
        Some((node, percent)) => {
            let share = percent.parse().ok().filter(|p| *p <= 99);
            (node, share.ok_or_else(|| format!("{percent:?} is not a share from 0 to 99"))?)
        }
    };
    if node.is_empty() {
        return Err("it names no node".into());
    }
    Ok(Kill { node: node.into(), percent })
}

#[derive(Args, Clone, Debug)]
#[command(
    long_about = "Runs one node until SIGINT or SIGTERM; then it drains and leaves. A second signal \
                  stops it at once.\n\n\
                  It runs jobs of the handler `digest`: {\"path\": FILE, \"wait_ms\": MS}. Nodes of \
                  one mesh share one database file.",
    after_help = "Examples:\n  \
                  meshwork node --id a --db jobs.db --bind 127.0.0.1:7946\n  \
                  meshwork node --id b --db jobs.db --bind 127.0.0.1:7947 --seed 127.0.0.1:7946"
)]
pub(crate) struct NodeArgs {
    /// The node's name, unique in its mesh: 1 to 64 bytes of visible text
    #[arg(long, value_name = "NAME")]
    pub(crate) id: NodeId,

    /// The mesh's name; nodes of another mesh are not heard
    #[arg(long, value_name = "NAME", default_value = "meshwork")]
    pub(crate) mesh: String,

    /// Where to take datagrams and, by TCP, joins
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7946")]
    pub(crate) bind: String,

    /// Where others reach this node, if that is not where it binds
    #[arg(long, value_name = "ADDR")]
    pub(crate) advertise: Option<String>,

    /// A node to join by, HOST:PORT; may be given more than once
    #[arg(long = "seed", value_name = "ADDR")]
    pub(crate) seeds: Vec<String>,

    /// The database file that the mesh shares
    #[arg(long, value_name = "FILE", default_value = "meshwork.db")]
    pub(crate) db: PathBuf,

    /// Jobs that run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u16).range(1..=1_024))]
    pub(crate) slots: u16,

    /// Jobs that the deque holds
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub(crate) buffer: u32,

    /// Neither steal nor be stolen from
    #[arg(long)]
    pub(crate) no_steal: bool,

    /// Seconds that running jobs have to end when the node stops
    #[arg(long, value_name = "S", default_value = "30", value_parser = parse_seconds)]
    pub(crate) drain: Duration,

    /// The Unix socket for `meshwork status` [default: NAME.sock in the runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Bind an address other than loopback although nothing is encrypted
    #[arg(long)]
    pub(crate) insecure: bool,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|s| (0..=86_400).contains(s));
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| "it is a whole number of seconds, at most 86400".into())
}

#[derive(Args, Clone, Debug)]
#[command(
    long_about = "Shows the members, the deque and the counters of a node that runs on this machine, \
                  asked by its Unix socket.",
    after_help = "Examples:\n  \
                  meshwork status                    the one node that runs here\n  \
                  meshwork status us-east-1 --json   that node, for programs\n  \
                  meshwork status --watch            then what happens to it, one JSON object a line"
)]
pub(crate) struct StatusArgs {
    /// The node's name [default: the one that runs here]
    #[arg(conflicts_with = "socket")]
    pub(crate) node: Option<NodeId>,

    /// Its Unix socket, if that is not in the runtime folder
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// Print what happens on the node, one JSON object a line, until it stops
    #[arg(long, conflicts_with = "json")]
    pub(crate) watch: bool,
}

#[cfg(target_os = "linux")]
#[derive(Args, Clone, Debug)]
#[command(
    long_about = "Shows the workers and clients of a directory of passes, what is under way, and how \
                  fast it goes.\n\n\
                  It only looks: it takes no place and no lock, and makes no file. Rates are between \
                  two looks.",
    after_help = "Examples:\n  \
                  meshwork passes /run/app                 who is there, and what they do\n  \
                  meshwork passes /run/app --watch         the same, again and again\n  \
                  meshwork passes /run/app --watch --json  one JSON object a line, for programs"
)]
pub(crate) struct PassesArgs {
    /// The directory that the processes open
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    /// Go on until interrupted
    #[arg(long)]
    pub(crate) watch: bool,

    /// Print one JSON object, on one line
    #[arg(long)]
    pub(crate) json: bool,

    /// Milliseconds between two looks
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 500,
        allow_negative_numbers = true,
        value_parser = value_parser!(u32).range(10..=60_000)
    )]
    pub(crate) interval: u32,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct DemoNodeArgs {
    /// How it is set up, as JSON
    pub(crate) setup: String,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn demo(args: &[&str]) -> Result<DemoArgs, String> {
        let args = ["meshwork", "demo"].iter().chain(args);
        match Cli::try_parse_from(args).map_err(|e| e.to_string())?.command {
            Some(Command::Demo(args)) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_a_command_there_is_none() {
        assert!(Cli::try_parse_from(["meshwork"]).unwrap().command.is_none());
    }

    #[test]
    fn kill_names_a_node_and_a_share() {
        let kill = |node: &str, percent| Kill { node: node.into(), percent };
        assert_eq!(parse_kill("us-east-1"), Ok(kill("us-east-1", 25)));
        assert_eq!(parse_kill("us-east-1@0"), Ok(kill("us-east-1", 0)));
        assert_eq!(parse_kill("a@b@99"), Ok(kill("a@b", 99)));
        assert_eq!(parse_kill("a@100"), Err("\"100\" is not a share from 0 to 99".into()));
        assert_eq!(parse_kill("a@"), Err("\"\" is not a share from 0 to 99".into()));
        assert_eq!(parse_kill("@5"), Err("it names no node".into()));
    }

    #[test]
    fn an_error_names_the_flag() {
        for (args, flag) in [
            (&["--nodes", "0"][..], "'--nodes <N>'"),
            (&["--nodes", "65"], "'--nodes <N>'"),
            (&["--jobs", "0"], "'--jobs <N>'"),
            (&["--jobs", "1000001"], "'--jobs <N>'"),
            (&["--work-ms", "-1"], "'--work-ms <MS>'"),
            (&["--jobs", "-1"], "'--jobs <N>'"),
            (&["--work-ms", "60001"], "'--work-ms <MS>'"),
            (&["--kill", "a@x"], "'--kill <NODE[@PERCENT]>'"),
            (&["--frobnicate"], "'--frobnicate'"),
        ] {
            let error = demo(args).unwrap_err();
            assert!(error.contains(flag), "{args:?}: {error}");
        }
        assert_eq!(demo(&[]).unwrap().nodes, 5);
    }
}
