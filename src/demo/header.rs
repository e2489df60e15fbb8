//! What a person is told before a run: what is done, where, and what in it is not as it would be in
//! earnest.

use std::path::Path;

use crate::cli::args::DemoArgs;
use crate::demo::plan::Stealing;
use crate::demo::report::counted;
use crate::demo::{Work, plan, regions, socket_path};

/// The header of a run.
pub(crate) fn text(
    args: &DemoArgs,
    work: &Work,
    stealing: Stealing,
    folder: &Path,
    db: &Path,
) -> String {
    let nodes = work.names.len();
    let files = work.found.files.len();
    let busy = work.names[..plan::busy_nodes(nodes)].join(" and ");
    let version = env!("CARGO_PKG_VERSION");
    let mut text = format!(
        "meshwork {version}: {} of {} slots, {} over {} of {}, {} ms of waiting each\n",
        counted(nodes as u64, "node"),
        plan::SLOTS,
        counted(work.jobs as u64, "job"),
        counted(files as u64, "file"),
        work.root.display(),
        args.work_ms,
    );
    let mut line = |name: &str, words: &str| text.push_str(&format!("  {name:<9} {words}\n"));
    if nodes <= regions::REGIONS.len() {
        line("regions", &work.names.join(", "));
    } else {
        line("regions", &format!("{}, .. {}", work.names[..5].join(", "), work.names[nodes - 1]));
    }
    if args.no_latency {
        line("latency", "none, all is loopback");
    } else {
        let round_trip = regions::longest_round_trip(nodes).as_millis();
        line(
            "latency",
            &format!(
                "emulated between regions, round trips of up to {round_trip} ms; the database has none"
            ),
        );
    }
    line(
        "database",
        &format!(
            "{}, one SQLite file for all{}",
            db.display(),
            if args.db.is_some() { "" } else { ", removed at the end" }
        ),
    );
    if nodes > 1 {
        line(
            "work",
            &format!(
                "4 of 5 jobs go to {busy}, whose deques hold them all: idle nodes steal rather than claim"
            ),
        );
    }
    if args.no_steal {
        line("stealing", "off");
    } else if nodes > 1 {
        line(
            "stealing",
            &format!(
                "{} jobs at most, asked for when {} or fewer wait, {} times a second from one peer{}",
                stealing.batch,
                stealing.threshold,
                stealing.rate_limit,
                if args.no_latency { "" } else { "; set for these round trips" },
            ),
        );
    }
    line("lease", &format!("{} s", plan::lease(nodes).as_secs()));
    if let Some(socket) = socket_path(folder, &work.names[0]) {
        line("look", &format!("meshwork status --socket {}", socket.display()));
    }
    text
}
