//! The demo: nodes on this machine, skewed work, and a check of what they did.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use actix::{Actor, System};
use meshwork::actors::store::messages::StoreHandle;
use meshwork::actors::store::sqlite::SqliteStore;
use meshwork::actors::work::enqueue::new_job_id;
use meshwork::{JobId, NodeId};
use tempfile::TempDir;

use crate::cli::args::{DemoArgs, JOBS_DEFAULT, JOBS_MAX};
use crate::cli::digest::{Digest, FilePath};
use crate::cli::signals::{self, Signals};
use crate::cli::socket::SOCKET_PATH_BYTES_MAX;
use crate::demo::child::Setup;
use crate::demo::files::Found;
use crate::demo::fleet::Fleet;
use crate::demo::ledger::Ledger;
use crate::demo::plan::Stealing;
use crate::demo::report::{Conditions, Report, counted, grouped, write_rows};
use crate::demo::run::{KillAt, Parts, Run, Stop};
use crate::demo::screen::{Screen, ScreenOptions};
use crate::demo::verify::{Direct, Findings, verify};

pub(crate) mod child;
mod files;
mod fleet;
mod header;
mod ledger;
mod links;
mod plan;
mod regions;
mod report;
mod run;
mod screen;
mod verify;

/// The exit status of a program that nobody reads any more: as if SIGPIPE had ended it.
const OUTPUT_CLOSED: u8 = 128 + 13;

/// Runs the demo.
pub(crate) fn run(args: &DemoArgs) -> ExitCode {
    let screen = Screen::new(ScreenOptions { headless: args.headless, json: args.json });
    let work = match Work::find(args) {
        Ok(work) => work,
        Err(error) => {
            screen.problem(&format!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    match System::new().block_on(live(args, screen, work)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Stop::Interrupted(signal)) => ExitCode::from(signals::exit_status(signal)),
        Err(Stop::OutputClosed) => ExitCode::from(OUTPUT_CLOSED),
        Err(Stop::Failed(error)) => {
            let options = ScreenOptions { headless: args.headless, json: args.json };
            Screen::new(options).problem(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// What there is to do.
struct Work {
    names: Vec<String>,
    kill: Option<usize>,
    root: PathBuf,
    found: Found,
    jobs: usize,
    /// Where one line a job goes; made now, so that a wrong path is known before the run.
    out: Option<File>,
}

impl Work {
    fn find(args: &DemoArgs) -> Result<Self, String> {
        let names: Vec<_> = (0..usize::from(args.nodes)).map(regions::node_name).collect();
        let kill = match &args.kill {
            None => None,
            Some(_) if names.len() < 2 => {
                return Err("--kill: the only node's jobs would have nobody to run them; \
                            raise --nodes"
                    .into());
            }
            Some(kill) => {
                Some(names.iter().position(|name| *name == kill.node).ok_or_else(|| {
                    format!(
                        "--kill: there is no node {:?}; there are {}",
                        kill.node,
                        names.join(", ")
                    )
                })?)
            }
        };
        let root = args.path.clone().unwrap_or_else(|| ".".into());
        let except = written_by_us(args);
        let wanted = match (&args.path, args.jobs) {
            (_, Some(jobs)) => jobs,
            (None, None) => JOBS_DEFAULT,
            (Some(_), None) => JOBS_MAX,
        } as usize;
        let shown = root.display();
        let found = files::regular_files(&root, wanted, &except)
            .map_err(|e| format!("PATH: {shown}: {e}"))?;
        if found.files.is_empty() {
            return Err(format!(
                "PATH: {shown} holds no regular file (`.git` and folders with a CACHEDIR.TAG are skipped)"
            ));
        }
        let one_a_file = args.path.is_some() && args.jobs.is_none();
        if one_a_file && found.more {
            return Err(format!(
                "PATH: {shown} holds more than {} files; name a smaller folder, or give --jobs",
                grouped(u64::from(JOBS_MAX))
            ));
        }
        let jobs = if one_a_file { found.files.len() } else { wanted };
        let out = match &args.out {
            None => None,
            Some(path) => {
                let failed = |e: std::io::Error| format!("--out: {}: {e}", path.display());
                if is_something_else(path).map_err(failed)? {
                    return Err(format!(
                        "--out: {} exists and holds something else; name another file",
                        path.display()
                    ));
                }
                Some(File::create(path).map_err(failed)?)
            }
        };
        Ok(Self { names, kill, root, found, jobs, out })
    }
}

/// Whether a file is there that no earlier run has written.
fn is_something_else(out: &Path) -> std::io::Result<bool> {
    // Asked before it is opened: a pipe would block its opener.
    match std::fs::metadata(out) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Ok(false),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    }
    let mut head = Vec::new();
    File::open(out)?.take(ROW_START.len() as u64).read_to_end(&mut head)?;
    Ok(!head.is_empty() && head != ROW_START)
}

/// How each row of `--out` begins.
const ROW_START: &[u8] = b"{\"seq\":";

/// Files that the demo itself writes while it runs are not among its input.
fn written_by_us(args: &DemoArgs) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    if let Some(db) = args.db.as_ref().and_then(|db| std::path::absolute(db).ok()) {
        for suffix in ["", "-wal", "-shm", "-journal"] {
            let mut name = db.clone().into_os_string();
            name.push(suffix);
            files.insert(name.into());
        }
    }
    files.extend(args.out.as_ref().and_then(|out| std::path::absolute(out).ok()));
    files
}

/// Lives through a run; whether it was what it should be. Whatever the end, the nodes have ended and
/// the temporary folder is gone.
async fn live(args: &DemoArgs, screen: Screen, mut work: Work) -> Result<bool, Stop> {
    let failed = |what: &str, e: &dyn std::fmt::Display| Stop::Failed(format!("{what}: {e}"));
    let signals = Signals::new().map_err(|e| failed("signals", &e))?;
    let folder = TempDir::with_prefix("meshwork-").map_err(|e| failed("temporary folder", &e))?;
    let db = args.db.clone().unwrap_or_else(|| folder.path().join("jobs.db"));
    let db = std::path::absolute(&db).map_err(|e| failed("--db", &e))?;
    let opened = SqliteStore::open(&db, &Default::default());
    let store = StoreHandle::of(&opened.map_err(|e| failed("--db", &e))?.start());

    let stealing = Stealing::on(!args.no_latency, work.names.len(), args.work_ms);
    screen.text(&header::text(args, &work, stealing, folder.path(), &db))?;
    for folder in &work.found.unreadable {
        screen.problem(&format!("  not read: {folder}"));
    }
    let files = std::mem::take(&mut work.found.files);
    let (sender, direct) = tokio::sync::oneshot::channel();
    let file_list = files.clone();
    // A thread that nobody joins: an interrupted run does not wait for it.
    std::thread::Builder::new()
        .name("digests".into())
        .spawn(move || sender.send(Direct::compute(file_list)))
        .map_err(|e| failed("thread", &e))?;

    let ids: Vec<JobId> = (0..work.jobs).map(|_| new_job_id()).collect();
    let nodes = work.names.iter().map(NodeId::new).collect::<Result<Vec<_>, _>>();
    let nodes = nodes.map_err(|e| failed("node names", &e))?;
    let setups = setups(args, &nodes, work.jobs, stealing, folder.path(), &db);
    let program = std::env::current_exe().map_err(|e| failed("this program's path", &e))?;
    let fleet = Fleet::new(program, setups);
    let wait_ms = args.work_ms;
    let mut run = Run::new(Parts {
        names: work.names.clone(),
        fleet,
        screen,
        signals,
        store,
        ledger: Ledger::new(&nodes, ids),
        job: Box::new(move |seq| Digest {
            path: FilePath(files[seq % files.len()].clone()),
            wait_ms,
        }),
        batches: plan::batches(work.jobs, nodes.len()),
        kill: work.kill.zip(args.kill.as_ref()).map(|(node, kill)| KillAt {
            node,
            done: (work.jobs * usize::from(kill.percent)).div_ceil(100),
        }),
        work: Duration::from_millis(u64::from(args.work_ms)),
    });
    let ended = through(args, &work, &mut run, direct).await;
    run.end().await;
    ended
}

async fn through(
    args: &DemoArgs,
    work: &Work,
    run: &mut Run,
    direct: tokio::sync::oneshot::Receiver<Direct>,
) -> Result<bool, Stop> {
    let converged_ms = run.form_mesh().await?;
    let all = work.names.len();
    run.screen().live(&format!("all {all} nodes see each other after {converged_ms:.0} ms"))?;
    let direct = run.wait_for(direct).await?;
    // A run that got stuck is reported too: what is lost is counted.
    let stuck = match run.do_work().await {
        Ok(()) => None,
        Err(Stop::Failed(error)) => Some(error),
        Err(stop) => return Err(stop),
    };
    run.end_nodes().await;
    let rows = run.rows().await?;
    let mut findings = verify(run.ledger(), &rows, &direct);
    if let Some(error) = stuck {
        findings.fail(error);
    }
    let conditions = Conditions {
        names: work.names.clone(),
        slots: plan::SLOTS as u64,
        work_ms: u64::from(args.work_ms),
        latency: !args.no_latency,
        stealing: !args.no_steal,
        killed: run.killed(),
        converged_ms: Some(converged_ms),
    };
    let report = Report::new(&conditions, run.ledger(), &findings);
    let mut out = Ok(());
    if let Some(file) = &work.out {
        out = write_rows(&mut BufWriter::new(file), &work.names, run.ledger(), &direct);
    }
    if let (Err(e), Some(path)) = (&out, &args.out) {
        run.screen().problem(&format!("error: --out: {}: {e}", path.display()));
    }
    tell(run.screen(), &report, &findings)?;
    if args.json {
        let json = serde_json::to_string(&report).expect("a report is JSON");
        run.screen().result(&json)?;
    }
    Ok(report.is_success() && out.is_ok())
}

/// Failures that are told one by one.
const FAILURES_TOLD: usize = 20;

fn tell(screen: &Screen, report: &Report, findings: &Findings) -> Result<(), Stop> {
    screen.text(&format!("\n{}", report.text()))?;
    let mut text = String::new();
    for (reason, jobs) in findings.failures.iter().take(FAILURES_TOLD) {
        text.push_str(&format!("failed, {}: {reason}\n", counted(*jobs as u64, "job")));
    }
    if let more @ 1.. = findings.failures.len().saturating_sub(FAILURES_TOLD) {
        text.push_str(&format!("and {more} more reasons\n"));
    }
    if report.looked_up > 0 {
        text.push_str(&format!(
            "{} outcomes are the database's word: the node that recorded them was killed before it told\n",
            report.looked_up
        ));
    }
    for path in &findings.changed {
        text.push_str(&format!("changed while the demo ran: {}\n", path.display()));
    }
    if report.verified {
        text.push_str(
            "verified: each job has one outcome, each digest equals a direct one, and each row of \
             the database agrees\n",
        );
    }
    screen.text(&text)?;
    if !report.verified {
        screen.problem(&format!(
            "NOT verified, {}:",
            counted(findings.problem_count as u64, "problem")
        ));
        for problem in &findings.problems {
            screen.problem(&format!("  {problem}"));
        }
    }
    Ok(())
}

fn socket_path(folder: &Path, name: &str) -> Option<PathBuf> {
    let path = folder.join(format!("{name}.sock"));
    (path.as_os_str().len() <= SOCKET_PATH_BYTES_MAX).then_some(path)
}

fn setups(
    args: &DemoArgs,
    nodes: &[NodeId],
    jobs: usize,
    stealing: Stealing,
    folder: &Path,
    db: &Path,
) -> Vec<Setup> {
    // Two demos at once are two meshes.
    let mesh = format!("demo-{}", std::process::id());
    let setup = |(index, id): (usize, &NodeId)| Setup {
        id: id.clone(),
        mesh: mesh.clone(),
        db: db.into(),
        socket: socket_path(folder, id.as_str()),
        slots: plan::SLOTS,
        buffer: plan::buffer(index, nodes.len(), jobs, stealing),
        stealing: !args.no_steal,
        steal_threshold: stealing.threshold,
        max_steal_batch: stealing.batch,
        steal_rate_limit: stealing.rate_limit,
        lease_ms: plan::lease(nodes.len()).as_millis() as u64,
        protocol_period_ms: 500,
        latency: !args.no_latency,
    };
    nodes.iter().enumerate().map(setup).collect()
}
