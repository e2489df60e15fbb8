//! What a run came to, for programs and for people.

use std::io::{self, Write};
use std::path::Path;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use crate::cli::digest::Xxh3Digest;
use crate::demo::ledger::{Ledger, Outcome};
use crate::demo::verify::{Direct, Findings};

/// The result of a run. Programs read these names: new ones are added at the end.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) nodes: usize,
    pub(crate) jobs: usize,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// Jobs without an outcome.
    pub(crate) lost: u64,
    /// Jobs with two recorded outcomes.
    pub(crate) duplicates: u64,
    /// Executions beyond the first.
    pub(crate) reruns: u64,
    pub(crate) requeued: u64,
    pub(crate) steals: u64,
    pub(crate) stolen: u64,
    /// From the start of the mesh until every node saw every other.
    pub(crate) converged_ms: Option<f64>,
    /// From the first enqueue to the first start of a stolen job.
    pub(crate) first_steal_ms: Option<f64>,
    /// From the first enqueue to the last outcome.
    pub(crate) elapsed_ms: Option<f64>,
    /// The share of all slots' time in which jobs did their waiting.
    pub(crate) efficiency: Option<f64>,
    pub(crate) per_node: Vec<NodeReport>,
    pub(crate) verified: bool,
    pub(crate) slots_per_node: u64,
    pub(crate) work_ms: u64,
    pub(crate) latency: bool,
    pub(crate) stealing: bool,
    pub(crate) killed: Option<String>,
    /// Outcomes taken from the database, because the node that recorded them was killed before it
    /// told.
    pub(crate) looked_up: u64,
    pub(crate) problems: Vec<String>,
}

/// One node's part.
#[derive(Debug, Serialize)]
pub(crate) struct NodeReport {
    pub(crate) node: String,
    pub(crate) enqueued: u64,
    pub(crate) ran: u64,
    pub(crate) stolen_in: u64,
    pub(crate) stolen_out: u64,
    /// From a job's enqueue to its first start here.
    pub(crate) wait_ms_median: Option<f64>,
    pub(crate) wait_ms_p99: Option<f64>,
}

/// How the run was set up.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    pub(crate) names: Vec<String>,
    pub(crate) slots: u64,
    pub(crate) work_ms: u64,
    pub(crate) latency: bool,
    pub(crate) stealing: bool,
    pub(crate) killed: Option<usize>,
    pub(crate) converged_ms: Option<f64>,
}

impl Report {
    pub(crate) fn new(conditions: &Conditions, ledger: &Ledger, findings: &Findings) -> Self {
        let node = |(name, node): (&String, &crate::demo::ledger::NodeEntry)| NodeReport {
            node: name.clone(),
            enqueued: node.enqueued,
            ran: node.ran,
            stolen_in: node.stolen_in,
            stolen_out: node.stolen_out,
            wait_ms_median: node.wait_ms(50).map(tenths),
            wait_ms_p99: node.wait_ms(99).map(tenths),
        };
        let slots = conditions.slots * conditions.names.len() as u64;
        let elapsed_ms = ledger.elapsed_ms();
        Self {
            nodes: conditions.names.len(),
            jobs: ledger.jobs.len(),
            succeeded: findings.succeeded,
            failed: findings.failed,
            lost: findings.lost,
            duplicates: findings.duplicates,
            reruns: findings.reruns,
            requeued: ledger.requeued,
            steals: ledger.steals,
            stolen: ledger.stolen,
            converged_ms: conditions.converged_ms.map(tenths),
            first_steal_ms: ledger.first_steal_ms().map(tenths),
            elapsed_ms: elapsed_ms.map(tenths),
            efficiency: elapsed_ms.map(|ms| {
                // All jobs, but for those that were lost or failed: these may never have waited.
                let work_ms = findings.succeeded as f64 * conditions.work_ms as f64;
                (work_ms / (ms * slots as f64) * 10_000.0).round() / 10_000.0
            }),
            per_node: conditions.names.iter().zip(&ledger.nodes).map(node).collect(),
            verified: findings.verified(),
            slots_per_node: conditions.slots,
            work_ms: conditions.work_ms,
            latency: conditions.latency,
            stealing: conditions.stealing,
            killed: conditions.killed.map(|node| conditions.names[node].clone()),
            looked_up: ledger.looked_up,
            problems: findings.problems.clone(),
        }
    }

    /// Whether the run was what it should be: the demo's exit status.
    pub(crate) fn is_success(&self) -> bool {
        self.verified && self.failed == 0 && self.lost == 0
    }

    /// The table and the totals, for people.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header([
            "region",
            "enqueued",
            "ran",
            "stolen in",
            "stolen out",
            "median wait",
            "p99 wait",
        ]);
        for node in &self.per_node {
            let killed = self.killed.as_ref() == Some(&node.node);
            table.add_row([
                format!("{}{}", node.node, if killed { " (killed)" } else { "" }),
                grouped(node.enqueued),
                grouped(node.ran),
                grouped(node.stolen_in),
                grouped(node.stolen_out),
                milliseconds(node.wait_ms_median),
                milliseconds(node.wait_ms_p99),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let total = |field: fn(&NodeReport) -> u64| grouped(self.per_node.iter().map(field).sum());
        table.add_row([
            "total".into(),
            total(|node| node.enqueued),
            total(|node| node.ran),
            total(|node| node.stolen_in),
            total(|node| node.stolen_out),
            String::new(),
            String::new(),
        ]);
        let mut text = String::new();
        for line in table.lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        let mut line = |words: String| {
            text.push_str(&words);
            text.push('\n');
        };
        line(String::new());
        line(format!(
            "{}: {} succeeded, {} failed, {} lost, {} with two outcomes; {} run again, {} requeued",
            counted(self.jobs as u64, "job"),
            grouped(self.succeeded),
            grouped(self.failed),
            grouped(self.lost),
            grouped(self.duplicates),
            grouped(self.reruns),
            grouped(self.requeued),
        ));
        line(format!(
            "{} brought {}; converged in {}, first stolen job after {}",
            counted(self.steals, "steal"),
            counted(self.stolen, "job"),
            milliseconds(self.converged_ms),
            milliseconds(self.first_steal_ms),
        ));
        line(format!(
            "elapsed {}, {} of the time of all {} slots",
            milliseconds(self.elapsed_ms),
            self.efficiency.map_or("-".into(), |e| format!("{:.1} %", e * 100.0)),
            self.slots_per_node * self.nodes as u64,
        ));
        text
    }
}

fn tenths(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

fn milliseconds(ms: Option<f64>) -> String {
    match ms {
        None => "-".into(),
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) => format!("{} ms", grouped(ms.round() as u64)),
    }
}

/// 2 and "job" as 2 jobs.
pub(crate) fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// 1234567 as 1,234,567.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[derive(Serialize)]
struct Row<'a> {
    seq: usize,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<&'a [u8]>,
    xxh3: Option<Xxh3Digest>,
    bytes: Option<u64>,
    lines: Option<u64>,
    node: Option<&'a str>,
    stolen: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Writes a line of JSON a job. A job that failed has its error and no digest; a path that is no
/// text has its bytes beside it.
///
/// # Errors
/// The writer's.
pub(crate) fn write_rows<W: Write>(
    writer: &mut W,
    names: &[String],
    ledger: &Ledger,
    direct: &Direct,
) -> io::Result<()> {
    for (seq, job) in ledger.jobs.iter().enumerate() {
        let path: &Path = direct.file(seq);
        let text = path.to_string_lossy();
        let answer = match &job.outcome {
            Some(Outcome::Succeeded(answer)) => Some(answer),
            _ => None,
        };
        let row = Row {
            seq,
            path: &text,
            path_bytes: path.to_str().is_none().then_some(path.as_os_str().as_encoded_bytes()),
            xxh3: answer.map(|a| a.xxh3),
            bytes: answer.map(|a| a.bytes),
            lines: answer.map(|a| a.lines),
            node: job.ran.map(|(node, _)| names[node].as_str()),
            stolen: job.ran.is_some_and(|(_, stolen)| stolen),
            error: match &job.outcome {
                Some(Outcome::Succeeded(_)) => None,
                Some(Outcome::Failed(reason) | Outcome::Garbled(reason)) => Some(reason),
                None => Some("no outcome"),
            },
        };
        serde_json::to_writer(&mut *writer, &row)?;
        writer.write_all(b"\n")?;
    }
    writer.flush()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meshwork::protocol::id::{JobId, NodeId};
    use meshwork::protocol::job::Recorded;

    use super::*;
    use crate::cli::protocol::JobNews;

    fn run() -> (Conditions, Ledger) {
        let names = ["us-east-1", "us-west-2"].map(String::from).to_vec();
        let ids = [0, 1].map(|n| JobId::from_bytes([n; 16]));
        let nodes: Vec<_> = names.iter().map(|n| NodeId::new(n).unwrap()).collect();
        let mut ledger = Ledger::new(&nodes, ids.to_vec());
        ledger.sent(0, &[0, 1], 0);
        let from = nodes[0].clone();
        ledger.hear(1, &JobNews::Stolen { at_us: 1_000, from, jobs: 1 });
        let answer = r#"{"xxh3":"00000000000000ab","bytes":3,"lines":1}"#;
        let ends = [
            Recorded::Succeeded(Arc::from(answer)),
            Recorded::Dead { error: "x: gone".into(), attempts: 1 },
        ];
        for (node, (job, recorded)) in ids.into_iter().zip(ends).enumerate() {
            let (attempt, stolen) = (1, node == 1);
            ledger.hear(node, &JobNews::Started { at_us: 2_040, job, attempt, stolen });
            let (recorded, error, at_us, ran_us) = (Some(recorded), None, 25_000, 1);
            let ended = JobNews::Ended { at_us, job, attempt, stolen, ran_us, recorded, error };
            ledger.hear(node, &ended);
        }
        let conditions = Conditions {
            names,
            slots: 4,
            work_ms: 20,
            latency: true,
            stealing: true,
            killed: None,
            converged_ms: Some(700.04),
        };
        (conditions, ledger)
    }

    #[test]
    fn the_json_has_the_promised_fields_in_their_order() {
        let (conditions, ledger) = run();
        let findings = Findings { succeeded: 1, failed: 1, ..Findings::default() };
        let report = Report::new(&conditions, &ledger, &findings);
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            concat!(
                r#"{"nodes":2,"jobs":2,"succeeded":1,"failed":1,"lost":0,"duplicates":0,"reruns":0,"#,
                r#""requeued":0,"steals":1,"stolen":1,"converged_ms":700.0,"first_steal_ms":2.0,"#,
                r#""elapsed_ms":25.0,"efficiency":0.1,"per_node":["#,
                r#"{"node":"us-east-1","enqueued":2,"ran":1,"stolen_in":0,"stolen_out":1,"wait_ms_median":2.0,"wait_ms_p99":2.0},"#,
                r#"{"node":"us-west-2","enqueued":0,"ran":1,"stolen_in":1,"stolen_out":0,"wait_ms_median":2.0,"wait_ms_p99":2.0}],"#,
                r#""verified":true,"slots_per_node":4,"work_ms":20,"latency":true,"stealing":true,"#,
                r#""killed":null,"looked_up":0,"problems":[]}"#,
            )
        );
        assert!(!report.is_success(), "a job failed");
    }

    #[test]
    fn the_table_is_for_people() {
        let (conditions, ledger) = run();
        let findings = Findings { succeeded: 1, failed: 1, ..Findings::default() };
        let conditions = Conditions { killed: Some(1), ..conditions };
        let text = Report::new(&conditions, &ledger, &findings).text();
        assert_eq!(
            text.lines().map(str::trim_end).collect::<Vec<_>>(),
            [
                " region              enqueued  ran  stolen in  stolen out  median wait  p99 wait",
                " us-east-1                  2    1          0           1       2.0 ms    2.0 ms",
                " us-west-2 (killed)         0    1          1           0       2.0 ms    2.0 ms",
                " total                      2    2          1           1",
                "",
                "2 jobs: 1 succeeded, 1 failed, 0 lost, 0 with two outcomes; 0 run again, 0 requeued",
                "1 steal brought 1 job; converged in 700 ms, first stolen job after 2.0 ms",
                "elapsed 25 ms, 10.0 % of the time of all 8 slots",
            ]
        );
    }

    #[test]
    fn a_row_a_job() {
        let (conditions, ledger) = run();
        let direct = Direct::compute(vec!["/nowhere".into()]);
        let mut rows = Vec::new();
        write_rows(&mut rows, &conditions.names, &ledger, &direct).unwrap();
        assert_eq!(
            String::from_utf8(rows).unwrap(),
            concat!(
                r#"{"seq":0,"path":"/nowhere","xxh3":"00000000000000ab","bytes":3,"lines":1,"node":"us-east-1","stolen":false}"#,
                "\n",
                r#"{"seq":1,"path":"/nowhere","xxh3":null,"bytes":null,"lines":null,"node":"us-west-2","stolen":true,"error":"x: gone"}"#,
                "\n",
            )
        );
    }

    #[test]
    fn numbers_are_grouped() {
        for (n, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(n), text);
        }
        assert_eq!(
            (counted(1, "job"), counted(2_000, "job")),
            ("1 job".into(), "2,000 jobs".into())
        );
    }
}
