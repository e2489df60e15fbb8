//! The nodes' processes: started, spoken to by their pipes, and ended whatever happens.
//!
//! A node whose stdin ends exits at once, so that none outlives this process, however it ends.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::cli::ndjson::{read_line, to_line};
use crate::cli::protocol::{Asked, Said};
use crate::demo::child::Setup;

/// What nodes have said and nobody has read yet; past it their pipes fill, and they wait.
const HEARD_MAX: usize = 1_024;
/// Requests to one node that its pipe has not taken; the parent bounds what is unanswered well
/// below it.
const REQUESTS_MAX: usize = 64;
/// Time that nodes have to exit once their stdin has ended.
const EXIT_LIMIT: Duration = Duration::from_secs(2);
/// Longest line of a node's stderr that is passed on, in bytes.
const STDERR_LINE_BYTES_MAX: usize = 2_000;

/// What comes from a node's process.
#[derive(Debug)]
pub(crate) enum Heard {
    /// It said this.
    Said(Box<Said>),
    /// It wrote this line, or what there was of it, to its stderr.
    Complained(String),
    /// What it said cannot be read.
    Garbled(String),
    /// It has ended; nothing more comes from it.
    Exited(io::Result<ExitStatus>),
}

/// The processes, numbered from 0.
pub(crate) struct Fleet {
    program: PathBuf,
    setups: VecDeque<Setup>,
    nodes: Vec<Node>,
    sender: mpsc::Sender<(usize, Heard)>,
    heard: mpsc::Receiver<(usize, Heard)>,
}

struct Node {
    requests: Option<mpsc::Sender<Vec<u8>>>,
    kill: Option<oneshot::Sender<()>>,
    exited: bool,
}

impl Fleet {
    /// Processes of this program, to be started one after another.
    pub(crate) fn new(program: PathBuf, setups: Vec<Setup>) -> Self {
        let (sender, heard) = mpsc::channel(HEARD_MAX);
        Self { program, setups: setups.into(), nodes: Vec::new(), sender, heard }
    }

    /// Starts the next process, if there is one left.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start_next(&mut self) -> io::Result<()> {
        let Some(setup) = self.setups.pop_front() else { return Ok(()) };
        let mut child = Command::new(&self.program)
            .arg("demo-node")
            .arg(serde_json::to_string(&setup)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's interrupt is the parent's to act on.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let stdin = child.stdin.take().expect("stdin is piped");
        let (requests, lines) = mpsc::channel(REQUESTS_MAX);
        let (kill, killed) = oneshot::channel();
        tokio::spawn(write_requests(stdin, lines));
        tokio::spawn(follow(self.nodes.len(), child, killed, self.sender.clone()));
        self.nodes.push(Node { requests: Some(requests), kill: Some(kill), exited: false });
        Ok(())
    }

    /// Asks a node; what is asked of one that has ended is lost.
    pub(crate) fn ask(&self, node: usize, asked: &Asked) {
        if let Some(requests) = self.nodes.get(node).and_then(|node| node.requests.as_ref()) {
            // A node that does not take its requests is found by the watchdog.
            let _ = requests.try_send(to_line(asked));
        }
    }

    /// Ends a node by SIGKILL.
    pub(crate) fn kill(&mut self, node: usize) {
        if let Some(kill) = self.nodes[node].kill.take() {
            // The process may have ended by itself.
            let _ = kill.send(());
        }
    }

    /// What a node says next, with its number.
    pub(crate) async fn hear(&mut self) -> (usize, Heard) {
        let heard = self.heard.recv().await;
        let (node, heard) = heard.expect("the fleet holds a sender itself");
        if matches!(heard, Heard::Exited(_)) {
            self.nodes[node].exited = true;
            self.nodes[node].requests = None;
        }
        (node, heard)
    }

    /// Ends every node: by the end of its stdin, and by SIGKILL if that is not enough.
    pub(crate) async fn end(&mut self) {
        for node in &mut self.nodes {
            node.requests = None;
        }
        if timeout(EXIT_LIMIT, self.all_exited()).await.is_err() {
            for node in 0..self.nodes.len() {
                self.kill(node);
            }
            // What SIGKILL does not end within the limit waits in the kernel, and no longer for us.
            let _ = timeout(EXIT_LIMIT, self.all_exited()).await;
        }
    }

    async fn all_exited(&mut self) {
        while self.nodes.iter().any(|node| !node.exited) {
            self.hear().await;
        }
    }
}

async fn write_requests(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Vec<u8>>) {
    while let Some(line) = lines.recv().await {
        if stdin.write_all(&line).await.is_err() {
            return;
        }
    }
}

/// Passes on what a process says until it has ended.
async fn follow(
    index: usize,
    mut child: Child,
    killed: oneshot::Receiver<()>,
    sender: mpsc::Sender<(usize, Heard)>,
) {
    let stdout = child.stdout.take().expect("stdout is piped");
    let stderr = child.stderr.take().expect("stderr is piped");
    let speech = listen(index, stdout, sender.clone());
    let complaints = complain(index, stderr, sender.clone());
    let end = async {
        tokio::select! {
            status = child.wait() => status,
            // A dropped sender is no order to kill.
            Ok(()) = killed => {
                child.start_kill()?;
                child.wait().await
            }
        }
    };
    let (status, (), ()) = tokio::join!(end, speech, complaints);
    // Without a reader the run is over.
    let _ = sender.send((index, Heard::Exited(status))).await;
}

async fn listen<R>(index: usize, stdout: R, sender: mpsc::Sender<(usize, Heard)>)
where
    R: AsyncRead + Unpin,
{
    let mut reader = BufReader::with_capacity(64 << 10, stdout);
    let mut line = Vec::new();
    loop {
        let heard = match read_line(&mut reader, &mut line).await {
            Ok(None) => return,
            Ok(Some(())) => match serde_json::from_slice(&line) {
                Ok(said) => Heard::Said(said),
                Err(e) => {
                    let text = String::from_utf8_lossy(&line[..line.len().min(200)]);
                    Heard::Garbled(format!("{e} in {text:?}"))
                }
            },
            Err(e) => Heard::Garbled(e.to_string()),
        };
        let last = matches!(heard, Heard::Garbled(_));
        if sender.send((index, heard)).await.is_err() || last {
            return;
        }
    }
}

async fn complain<R>(index: usize, stderr: R, sender: mpsc::Sender<(usize, Heard)>)
where
    R: AsyncRead + Unpin,
{
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    while let Ok(Some(())) = read_line(&mut reader, &mut line).await {
        let text = String::from_utf8_lossy(&line[..line.len().min(STDERR_LINE_BYTES_MAX)]);
        if sender.send((index, Heard::Complained(text.into_owned()))).await.is_err() {
            return;
        }
    }
}
