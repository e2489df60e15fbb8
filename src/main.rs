//! The `meshwork` binary: a demo, a stand-alone node, an operator's view.
#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::cli::args::{Cli, Command};

mod cli;
mod demo;

fn main() -> ExitCode {
    let command = Cli::parse().command.unwrap_or_else(Command::default_demo);
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()))
        .with_ansi(std::io::stderr().is_terminal() && !cli::no_color())
        .with_writer(std::io::stderr)
        .init();
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::DemoNode(args) => demo::child::run(&args.setup),
        Command::Node(args) => cli::node::run(args),
        Command::Status(args) => cli::status::run(&args),
        #[cfg(target_os = "linux")]
        Command::Passes(args) => cli::passes::run(&args),
    }
}
