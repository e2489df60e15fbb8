//! This program in another process, where it works until this one ends it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

const READY: &str = "ready";

/// The other process says that it is ready, and waits for the end of the one that started it.
pub(crate) fn ready_until_the_end() {
    println!("{READY}");
    std::io::stdout().flush().expect("the other end reads");
    // Ends with the process that has the other end.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// The other process. Killed when dropped.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    /// Starts it with these arguments, and waits until it says that it is ready.
    pub(crate) fn start(args: &[OsString]) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started again");
        let stdout = child.stdout.take().expect("it is piped");
        let process = Self(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a pipe can be read");
        assert_eq!(line.trim_end(), READY, "the process did not come up");
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
