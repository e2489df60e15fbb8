//! Whether the run did what it should have: the nodes' events, the database and the files agree.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use meshwork::JobRow;
use meshwork::protocol::id::JobId;
use meshwork::protocol::job::JobState;

use crate::cli::digest::{Answer, digest_file};
use crate::demo::ledger::{Ledger, Outcome};

/// Problems that are printed; more are counted.
const PROBLEMS_MAX: usize = 20;

/// Digests of files, computed here and not by a job.
#[derive(Debug)]
pub(crate) struct Direct {
    files: Vec<PathBuf>,
    answers: Vec<Result<Answer, String>>,
}

impl Direct {
    /// Digests the files.
    pub(crate) fn compute(files: Vec<PathBuf>) -> Self {
        let answers = files.iter().map(|path| direct(path)).collect();
        Self { files, answers }
    }

    /// The file of job number `seq`: the jobs cycle through the files.
    pub(crate) fn file(&self, seq: usize) -> &Path {
        &self.files[seq % self.files.len()]
    }
}

fn direct(path: &Path) -> Result<Answer, String> {
    digest_file(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// What should not be, at most [`PROBLEMS_MAX`] of it.
    pub(crate) problems: Vec<String>,
    /// How much of it there is.
    pub(crate) problem_count: usize,
    /// Files whose bytes changed while the demo ran: their jobs answered for one of the two.
    pub(crate) changed: BTreeSet<PathBuf>,
    /// Why jobs failed, each reason once with the number of jobs, in order of first appearance.
    pub(crate) failures: Vec<(String, usize)>,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// Jobs without an outcome.
    pub(crate) lost: u64,
    /// Jobs with two outcomes.
    pub(crate) duplicates: u64,
    /// Executions beyond the first.
    pub(crate) reruns: u64,
}

impl Findings {
    pub(crate) fn verified(&self) -> bool {
        self.problem_count == 0
    }

    /// Something else is wrong with the run; it is the first thing to say.
    pub(crate) fn fail(&mut self, problem: String) {
        self.problem_count += 1;
        self.problems.insert(0, problem);
    }

    fn problem(&mut self, problem: String) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        }
    }
}

/// Compares what the nodes said with the database's rows and with the files.
pub(crate) fn verify(
    ledger: &Ledger,
    rows: &HashMap<JobId, JobRow>,
    direct_answers: &Direct,
) -> Findings {
    let mut findings = Findings::default();
    let mut failures = HashMap::<&str, usize>::new();
    let mut now = HashMap::<&Path, Result<Answer, String>>::new();
    for (seq, job) in ledger.jobs.iter().enumerate() {
        let path = direct_answers.file(seq);
        let name = || format!("job {seq} ({}, {})", path.display(), job.id);
        let row = rows.get(&job.id);
        let begun = job.starts.max(row.map_or(0, |row| row.attempts));
        findings.reruns += u64::from(begun.saturating_sub(1));
        if job.outcomes > 1 {
            findings.duplicates += 1;
            findings.problem(format!("{}: {} outcomes were recorded", name(), job.outcomes));
        }
        let Some(outcome) = &job.outcome else {
            findings.lost += 1;
            let state = row.map_or("not there", |row| row.state.name());
            findings.problem(format!("{}: no outcome; in the database it is {state}", name()));
            continue;
        };
        match outcome {
            Outcome::Succeeded(answer) => {
                findings.succeeded += 1;
                let before = &direct_answers.answers[seq % direct_answers.answers.len()];
                if before.as_ref() != Ok(answer) {
                    // The file may have been written to since.
                    let after = now.entry(path).or_insert_with(|| direct(path));
                    if after.as_ref() != Ok(answer) {
                        findings.problem(format!(
                            "{}: it answered {} of {} bytes, and a direct digest is {}; did the file \
                             change while the demo ran?",
                            name(),
                            answer.xxh3,
                            answer.bytes,
                            match after {
                                Ok(after) => format!("{} of {} bytes", after.xxh3, after.bytes),
                                Err(e) => format!("not to be had: {e}"),
                            }
                        ));
                    } else {
                        findings.changed.insert(path.into());
                    }
                }
            }
            Outcome::Garbled(text) => {
                findings.failed += 1;
                findings.problem(format!("{}: its result is no answer: {text}", name()));
            }
            Outcome::Failed(reason) => {
                findings.failed += 1;
                if let Some(index) = failures.get(reason.as_str()) {
                    findings.failures[*index].1 += 1;
                } else {
                    failures.insert(reason, findings.failures.len());
                    findings.failures.push((reason.clone(), 1));
                }
            }
        }
        match row {
            None => findings.problem(format!("{}: the database does not have it", name())),
            Some(row) => {
                let final_state = match outcome {
                    Outcome::Failed(_) => JobState::Dead,
                    _ => JobState::Succeeded,
                };
                let agrees = row.state == final_state
                    && row.recorded.as_ref().is_some_and(|r| Outcome::from(r) == *outcome);
                if !agrees {
                    findings.problem(format!(
                        "{}: its node said {outcome:?}, the database says {} {:?}",
                        name(),
                        row.state,
                        row.recorded
                    ));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meshwork::protocol::id::NodeId;
    use meshwork::protocol::job::Recorded;

    use super::*;
    use crate::cli::protocol::JobNews;

    fn id(n: u8) -> JobId {
        JobId::from_bytes([n; 16])
    }

    struct Case {
        dir: tempfile::TempDir,
        ledger: Ledger,
        rows: HashMap<JobId, JobRow>,
        direct: Direct,
    }

    impl Case {
        /// Two jobs on each of the files `x` and `y`; all succeeded and everything agrees.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let files: Vec<_> = ["x", "y"].iter().map(|name| dir.path().join(name)).collect();
            for file in &files {
                std::fs::write(file, "one\ntwo\n").unwrap();
            }
            let ledger = Ledger::new(&[NodeId::new("a").unwrap()], (0..4).map(id).collect());
            let direct = Direct::compute(files);
            let mut case = Self { dir, ledger, rows: HashMap::new(), direct };
            for n in 0..4 {
                let answer = case.direct.answers[0].clone().unwrap();
                let json = serde_json::to_string(&answer).unwrap();
                case.end(n, Recorded::Succeeded(Arc::from(json)));
            }
            case
        }

        fn end(&mut self, n: u8, recorded: Recorded) {
            let job = id(n);
            let (attempt, stolen, at_us, ran_us) = (1, false, 1, 1);
            self.ledger.hear(0, &JobNews::Started { at_us, job, attempt, stolen });
            let state = match recorded {
                Recorded::Succeeded(_) => JobState::Succeeded,
                _ => JobState::Dead,
            };
            self.row(n, state, Some(recorded.clone()));
            let (recorded, error) = (Some(recorded), None);
            self.ledger
                .hear(0, &JobNews::Ended { at_us, job, attempt, stolen, ran_us, recorded, error });
        }

        fn row(&mut self, n: u8, state: JobState, recorded: Option<Recorded>) {
            let row = JobRow { id: id(n), state, attempts: 1, recorded, last_error: None };
            self.rows.insert(id(n), row);
        }

        fn verify(&self) -> Findings {
            verify(&self.ledger, &self.rows, &self.direct)
        }
    }

    #[test]
    fn a_run_where_everything_agrees_is_verified() {
        let findings = Case::new().verify();
        assert_eq!(findings, Findings { succeeded: 4, ..Findings::default() });
        assert!(findings.verified());
    }

    #[test]
    fn a_wrong_digest_is_a_problem() {
        let mut case = Case::new();
        case.direct.answers[1] = case.direct.answers[1].clone().map(|mut a| {
            a.bytes += 1;
            a
        });
        std::fs::write(case.dir.path().join("y"), "other").unwrap();
        let findings = case.verify();
        assert_eq!((findings.problem_count, findings.verified()), (2, false));
        assert!(findings.problems[0].starts_with("job 1 ("), "{findings:?}");
    }

    #[test]
    fn a_file_that_changed_in_mid_run_answers_for_before_or_after() {
        let mut case = Case::new();
        case.direct.answers[1] = Err("not yet there".into());
        let findings = case.verify();
        assert!(findings.verified());
        assert_eq!(findings.changed, BTreeSet::from([case.dir.path().join("y")]));
    }

    #[test]
    fn a_job_without_an_outcome_is_lost() {
        let mut case = Case::new();
        case.ledger.jobs[2].outcome = None;
        case.row(2, JobState::Running, None);
        let findings = case.verify();
        assert_eq!((findings.lost, findings.verified()), (1, false));
        assert!(findings.problems[0].ends_with("in the database it is running"), "{findings:?}");
    }

    #[test]
    fn two_outcomes_are_a_duplicate_and_a_rerun() {
        let mut case = Case::new();
        let recorded = case.rows[&id(3)].recorded.clone().unwrap();
        case.end(3, recorded);
        let findings = case.verify();
        assert_eq!((findings.duplicates, findings.reruns, findings.verified()), (1, 1, false));
    }

    #[test]
    fn the_database_must_agree() {
        for (state, recorded) in [
            (JobState::Queued, None),
            (JobState::Succeeded, Some(Recorded::Succeeded(Arc::from("{}")))),
            (JobState::Dead, Some(Recorded::Dead { error: "e".into(), attempts: 1 })),
        ] {
            let mut case = Case::new();
            case.row(0, state, recorded);
            assert_eq!(case.verify().problem_count, 1, "{state}");
        }
        let mut case = Case::new();
        case.rows.remove(&id(0));
        assert_eq!(case.verify().problem_count, 1);
    }

    #[test]
    fn a_failure_with_its_reason_is_verified_and_counted() {
        let mut case = Case::new();
        let dead = || Recorded::Dead { error: "x: gone".into(), attempts: 1 };
        let mut ledger = Ledger::new(&[NodeId::new("a").unwrap()], (0..4).map(id).collect());
        std::mem::swap(&mut case.ledger, &mut ledger);
        for n in 0..2 {
            let recorded = case.rows[&id(n)].recorded.clone().unwrap();
            case.end(n, recorded);
        }
        case.end(2, dead());
        case.end(3, dead());
        let findings = case.verify();
        assert!(findings.verified());
        assert_eq!((findings.succeeded, findings.failed), (2, 2));
        assert_eq!(findings.failures, [("x: gone".to_owned(), 2)]);
    }
}
