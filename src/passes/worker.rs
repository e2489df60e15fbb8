//! The main function of a worker process.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use super::{PassRegistry, Passes, PassesBuilder};

const USAGE: &str = "\
usage: PROGRAM DIRECTORY [--workers N] [--name NAME]

Runs passes of the directory in N worker threads (default 1) until SIGTERM or SIGINT; then each ends
the pass that it runs. A second signal stops them at once.";

/// What a worker process was told on its command line.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    directory: PathBuf,
    workers: usize,
    name: String,
}

enum Told {
    Run(Arguments),
    Help,
}

/// The main function of a worker process: takes the directory and the number of threads from the
/// command line, runs passes to the closures of `registry`, and recovers what other processes leave
/// when they die. Returns after SIGTERM or SIGINT, when each worker has ended the pass that it runs, or
/// with an error on stderr.
///
/// ```no_run
/// # use meshwork::passes::PassRegistry;
/// fn main() -> std::process::ExitCode {
///     let registry = PassRegistry::new();
///     registry.register("echo", |call| Ok::<_, String>(call.args.to_vec())).expect("a free name");
///     meshwork::worker_main(registry)
/// }
/// ```
pub fn worker_main(registry: PassRegistry) -> ExitCode {
    let arguments = match parse(std::env::args_os().skip(1)) {
        Ok(Told::Run(arguments)) => arguments,
        Ok(Told::Help) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let builder = Passes::builder(arguments.directory)
        .name(arguments.name)
        .workers(arguments.workers)
        .registry(registry);
    match actix::System::new().block_on(run(builder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(builder: PassesBuilder) -> Result<(), Box<dyn std::error::Error>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let passes = builder.start_workers().await?;
    let failed = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        failed = passes.failed() => failed,
    };
    tokio::select! {
        () = passes.leave() => {}
        // Whoever asks twice does not want to wait for what runs; others run it again.
        _ = terminate.recv() => return Err("stopped while passes were running".into()),
        _ = interrupt.recv() => return Err("stopped while passes were running".into()),
    }
    failed.map_or(Ok(()), |why| Err(why.into()))
}

fn parse(mut given: impl Iterator<Item = OsString>) -> Result<Told, String> {
    let (mut directory, mut workers, mut name) = (None, 1, String::new());
    while let Some(argument) = given.next() {
        let mut value = |of: &str| {
            let value = given.next().ok_or(format!("{of} needs a value"))?;
            value.into_string().map_err(|value| format!("{of}: {} is not UTF-8", value.display()))
        };
        match argument.to_str() {
            Some("--help" | "-h") => return Ok(Told::Help),
            Some("--workers") => {
                let text = value("--workers")?;
                workers = match text.parse() {
                    Ok(threads @ 1..) => threads,
                    _ => return Err(format!("--workers: {text:?} is not a number from 1 up")),
                };
            }
            Some("--name") => name = value("--name")?,
            Some(flag) if flag.starts_with('-') => return Err(format!("unknown flag {flag}")),
            _ if directory.is_none() => directory = Some(PathBuf::from(argument)),
            _ => return Err(format!("one directory is enough: {}", argument.display())),
        }
    }
    let directory = directory.ok_or("which directory?")?;
    Ok(Told::Run(Arguments { directory, workers, name }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(arguments: &[&str]) -> Result<Arguments, String> {
        match parse(arguments.iter().map(OsString::from))? {
            Told::Run(arguments) => Ok(arguments),
            Told::Help => Err("help".into()),
        }
    }

    #[test]
    fn a_command_line_is_read_in_any_order() {
        let expected = Arguments { directory: "/d".into(), workers: 4, name: "a worker".into() };
        assert_eq!(told(&["/d", "--workers", "4", "--name", "a worker"]), Ok(expected));
        let expected = Arguments { directory: "/d".into(), workers: 1, name: String::new() };
        assert_eq!(told(&["/d"]), Ok(expected));
    }

    #[test]
    fn what_is_wrong_with_a_command_line_is_named() {
        let error = |arguments: &[&str]| told(arguments).unwrap_err();
        assert_eq!(error(&[]), "which directory?");
        assert_eq!(error(&["/d", "/e"]), "one directory is enough: /e");
        assert_eq!(error(&["/d", "--workers"]), "--workers needs a value");
        assert_eq!(error(&["/d", "--workers", "0"]), "--workers: \"0\" is not a number from 1 up");
        assert_eq!(error(&["/d", "--threads", "2"]), "unknown flag --threads");
    }
}
