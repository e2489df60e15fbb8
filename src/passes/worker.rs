//! The main function of a worker process.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use lexopt::{Arg, ValueExt};
use tokio::signal::unix::{SignalKind, signal};

use super::{ClosureId, PassRegistry, Passes, PassesBuilder, Registered};

const USAGE: &str = "\
usage: PROGRAM DIRECTORY [--workers N] [--name NAME]

Runs passes of the directory in N worker threads (default 1) until SIGTERM or SIGINT; then each ends
the pass that it runs. A second signal stops them at once. The name (default: the program's and its
process id) is what `meshwork passes DIRECTORY` shows.";

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
            say(std::io::stdout(), USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            say(std::io::stderr(), &format!("error: {error}\n\n{USAGE}"));
            return ExitCode::from(2);
        }
    };
    say(std::io::stderr(), &greeting(&arguments, &registry));
    let builder = Passes::builder(arguments.directory)
        .name(arguments.name)
        .workers(arguments.workers)
        .registry(registry);
    match actix::System::new().block_on(run(builder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(std::io::stderr(), &format!("error: {error}"));
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

/// Also where nobody reads.
fn say(mut to: impl Write, text: &str) {
    let _ = writeln!(to, "{text}");
}

/// Names of closures in a line.
const NAMES_MAX: usize = 8;

fn greeting(arguments: &Arguments, registry: &PassRegistry) -> String {
    let Arguments { directory, workers, name } = arguments;
    let name_of = |(id, closure): (ClosureId, Registered)| match &*closure.name {
        "" => id.to_string(),
        name => name.to_owned(),
    };
    let mut closures: Vec<_> = registry.all().into_iter().map(name_of).collect();
    closures.sort_unstable();
    let more = closures.len().saturating_sub(NAMES_MAX);
    closures.truncate(NAMES_MAX);
    let closures = match (closures.is_empty(), more) {
        (true, _) => "no closure".to_owned(),
        (_, 0) => closures.join(", "),
        _ => format!("{} and {more} more", closures.join(", ")),
    };
    let threads = if *workers == 1 { "worker" } else { "workers" };
    format!("{name}: {workers} {threads} in {}, for {closures}", directory.display())
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Told, lexopt::Error> {
    let mut parser = lexopt::Parser::from_args(arguments);
    let (mut directory, mut workers, mut name) = (None, 1, None);
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("help") | Arg::Short('h') => return Ok(Told::Help),
            Arg::Long("workers") => {
                let value = parser.value()?;
                workers = value.parse_with(|text| match text.parse() {
                    Ok(threads @ 1..) => Ok(threads),
                    _ => Err("--workers is a number from 1 up"),
                })?;
            }
            Arg::Long("name") => name = Some(parser.value()?.string()?),
            Arg::Value(value) if directory.is_none() => directory = Some(PathBuf::from(value)),
            Arg::Value(value) => {
                return Err(format!("one directory is enough: {}", value.display()).into());
            }
            other => return Err(other.unexpected()),
        }
    }
    let directory = directory.ok_or("which directory?")?;
    let name = name.unwrap_or_else(|| format!("{}-{}", program(), std::process::id()));
    Ok(Told::Run(Arguments { directory, workers, name }))
}

/// What this program is called.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_stem().map_or("worker".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(arguments: &[&str]) -> Result<Arguments, String> {
        match parse(arguments.iter().map(OsString::from)).map_err(|error| error.to_string())? {
            Told::Run(arguments) => Ok(arguments),
            Told::Help => Err("help".into()),
        }
    }

    #[test]
    fn a_command_line_is_read_in_any_order() {
        let expected = Arguments { directory: "/d".into(), workers: 4, name: "a worker".into() };
        assert_eq!(told(&["/d", "--workers", "4", "--name", "a worker"]), Ok(expected));
        let of_process = format!("{}-{}", program(), std::process::id());
        let expected = Arguments { directory: "/d".into(), workers: 1, name: of_process };
        assert_eq!(told(&["/d"]), Ok(expected));
        let expected = Arguments { directory: "-d".into(), workers: 2, name: "w".into() };
        assert_eq!(told(&["--workers=2", "--name=w", "--", "-d"]), Ok(expected));
    }

    #[test]
    fn a_worker_process_says_what_it_is() {
        let registry = PassRegistry::new();
        let arguments = told(&["/d", "--name", "w"]).unwrap();
        assert_eq!(greeting(&arguments, &registry), "w: 1 worker in /d, for no closure");
        registry.register("resize", |call| Ok::<_, String>(call.args.to_vec())).unwrap();
        registry.register("encode", |call| Ok::<_, String>(call.args.to_vec())).unwrap();
        let arguments = told(&["/d", "--name", "w", "--workers", "4"]).unwrap();
        assert_eq!(greeting(&arguments, &registry), "w: 4 workers in /d, for encode, resize");
        for name in ["a", "b", "c", "d", "e", "f", "g"] {
            registry.register(name, |call| Ok::<_, String>(call.args.to_vec())).unwrap();
        }
        let many = greeting(&arguments, &registry);
        assert_eq!(many, "w: 4 workers in /d, for a, b, c, d, e, encode, f, g and 1 more");
    }

    #[test]
    fn what_is_wrong_with_a_command_line_is_named() {
        let error = |arguments: &[&str]| told(arguments).unwrap_err();
        assert_eq!(error(&[]), "which directory?");
        assert_eq!(error(&["/d", "/e"]), "one directory is enough: /e");
        assert_eq!(error(&["/d", "--workers"]), "missing argument for option '--workers'");
        let none = "cannot parse argument \"0\": --workers is a number from 1 up";
        assert_eq!(error(&["/d", "--workers", "0"]), none);
        assert_eq!(error(&["/d", "--threads", "2"]), "invalid option '--threads'");
    }
}
