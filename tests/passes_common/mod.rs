//! Worker processes, as a user starts them, and a closure that runs until it is let go.
#![allow(dead_code, reason = "each test uses its part")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};

use meshwork::passes::PassRegistry;
use rustix::process::{Pid, Signal, kill_process};

/// Builds an example, in the profile of this test, and says where it is: cargo does so by itself
/// only when all tests are asked for.
pub(crate) fn example(name: &str) -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--example", name]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "the example {name} builds");
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

/// Registers a closure, "hold", that says when it has begun, and runs until it is let go.
pub(crate) fn hold(registry: &PassRegistry) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (sender, begun) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    let hold = registry.register("hold", move |_| {
        sender.send(()).unwrap();
        may_go.lock().unwrap().recv().unwrap();
        Ok::<_, String>("held")
    });
    hold.unwrap();
    (begun, go)
}

/// A process whose output is read; killed with the test, whatever happens.
pub(crate) struct Process {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(program: &Path, args: &[&str]) -> Self {
        let mut child = Command::new(program).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line; panics at the end of the output.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it says more");
        line.trim_end().into()
    }

    /// Reads until each of these lines was said, in whatever order.
    pub(crate) fn says(&mut self, lines: &[&str]) {
        let mut missing = lines.to_vec();
        while !missing.is_empty() {
            let line = self.line();
            missing.retain(|wanted| *wanted != line);
        }
    }

    pub(crate) fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Awaits its end: how it ended, and what else it said.
    pub(crate) fn ended(&mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap(), rest)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
