//! The plans of the statements that a busy store runs: each must find its rows by the key or index
//! that is meant for it, whatever the size of the tables.

use rusqlite::Connection;

use super::jobs::{BY_ID, CLAIM, DUE, DUE_OF, HAND_ON, PROMOTE, RELEASE, START, SUCCEED};
use super::leases::HELD;
use super::open::{SqliteOptions, open};
use super::reads::{CLAIMS_OF, LOOKUP, NEXT_DUE};

fn plan(connection: &Connection, sql: &str) -> Vec<String> {
    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let nulls = vec![rusqlite::types::Null; statement.parameter_count()];
    let rows = statement.query_map(rusqlite::params_from_iter(nulls), |row| row.get(3)).unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn every_statement_uses_its_own_index_and_sorts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (connection, _) = open(&folder.path().join("jobs.db"), &SqliteOptions::default()).unwrap();
    let by_id = [
        "SEARCH job_states USING INTEGER PRIMARY KEY (rowid=?)",
        "SCALAR SUBQUERY 1",
        "SEARCH jobs USING COVERING INDEX sqlite_autoindex_jobs_1 (id=?)",
    ];
    let by_seq = "SEARCH job_states USING INTEGER PRIMARY KEY (rowid=?)";
    let held = "SEARCH s USING INDEX held (owner=?)";
    let body = "SEARCH j USING INTEGER PRIMARY KEY (rowid=?)";
    for (sql, expected) in [
        (DUE_OF, vec!["SEARCH s USING INDEX due_of (affinity=?)", body]),
        (DUE, vec!["SCAN s USING INDEX due", body]),
        (CLAIM, vec![by_seq]),
        (
            PROMOTE,
            vec![by_seq, "LIST SUBQUERY 1", "SEARCH job_states USING INDEX later (due_ms<?)"],
        ),
        (
            BY_ID,
            vec![
                "SEARCH j USING INDEX sqlite_autoindex_jobs_1 (id=?)",
                "SEARCH s USING INTEGER PRIMARY KEY (rowid=?)",
            ],
        ),
        (START, by_id.to_vec()),
        (SUCCEED, by_id.to_vec()),
        (HAND_ON, by_id.to_vec()),
        (RELEASE, by_id.to_vec()),
        (HELD, vec![held, body]),
        (CLAIMS_OF, vec![held, body]),
        (
            LOOKUP,
            vec![
                "SEARCH j USING COVERING INDEX sqlite_autoindex_jobs_1 (id=?)",
                "SEARCH s USING INTEGER PRIMARY KEY (rowid=?)",
            ],
        ),
        (NEXT_DUE, vec!["SEARCH job_states USING INDEX later"]),
    ] {
        assert_eq!(plan(&connection, sql), expected, "{sql}");
    }
}
