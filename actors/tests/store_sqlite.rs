//! What is particular to the SQLite store: the files that it opens and refuses, batches that fail in
//! part or as a whole, and what other programs read.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod store_common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor;
use futures_util::future::{join, join_all};
use meshwork_actors::store::messages::*;
use meshwork_actors::store::sqlite::{OpenError, SqliteOptions, SqliteStore};
use meshwork_protocol::id::{FencingToken, Generation};
use meshwork_protocol::job::{Disposition, JobSpec, JobState};
use rusqlite::Connection;

use store_common::*;

fn refused(path: &Path) -> OpenError {
    let options =
        SqliteOptions { busy_wait: Duration::from_millis(20), ..SqliteOptions::default() };
    SqliteStore::open(path, &options).expect_err("it must not be opened")
}

#[test]
fn a_new_or_empty_file_becomes_a_database_and_opens_again() {
    let folder = tempfile::tempdir().unwrap();
    let new = folder.path().join("new.db");
    let empty = folder.path().join("empty ü?mode=ro&.db");
    fs::write(&empty, b"").unwrap();
    for path in [&new, &empty, &new, &empty] {
        SqliteStore::open(path, &SqliteOptions::default()).unwrap();
    }
    assert_eq!(&fs::read(&empty).unwrap()[..15], b"SQLite format 3");
}

#[test]
fn what_is_no_sqlite_database_is_refused_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("short", b"hello".to_vec()),
        ("text", b"some notes\n".repeat(1_000)),
        ("zeros", vec![0; 8_192]),
        ("cut", b"SQLite format 3\0".repeat(64)),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, &content).unwrap();
        let error = refused(&path);
        assert_eq!(error, OpenError::NotSqlite(path.clone()), "{name}");
        assert_eq!(fs::read(&path).unwrap(), content, "{name} is as it was");
    }
}

#[test]
fn a_database_of_another_program_is_refused_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    for (name, sql) in [
        ("tables", "CREATE TABLE t (x)"),
        ("application", "PRAGMA application_id = 77; CREATE TABLE t (x); DROP TABLE t"),
        ("version", "PRAGMA user_version = 3; CREATE TABLE t (x); DROP TABLE t"),
    ] {
        let path = folder.path().join(name);
        Connection::open(&path).unwrap().execute_batch(sql).unwrap();
        let before = fs::read(&path).unwrap();
        let error = refused(&path);
        assert_eq!(error, OpenError::NotMeshwork(path.clone()), "{name}");
        assert_eq!(fs::read(&path).unwrap(), before, "{name} is as it was");
    }
}

#[test]
fn a_database_of_a_newer_version_is_refused_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.db");
    SqliteStore::open(&path, &SqliteOptions::default()).unwrap();
    Connection::open(&path).unwrap().execute_batch("PRAGMA user_version = 9").unwrap();
    let error = refused(&path);
    assert_eq!(error, OpenError::Newer { path: path.clone(), found: 9, known: 1 });
    assert_eq!(
        error.to_string(),
        format!(
            "{} has version 9 of the tables, and this meshwork knows up to 1; \
             use the newer meshwork that wrote it",
            path.display()
        )
    );
}

#[test]
fn a_path_that_cannot_be_a_file_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(refused(folder.path()), OpenError::Folder(folder.path().to_owned()));
    let missing = folder.path().join("missing");
    let path = missing.join("jobs.db");
    assert_eq!(refused(&path), OpenError::NoFolder { path, folder: missing });
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let beneath = file.join("jobs.db");
    let error = refused(&beneath);
    assert!(matches!(&error, OpenError::Failed { path, .. } if *path == beneath), "{error:?}");
}

#[cfg(unix)]
#[test]
fn a_file_that_may_not_be_written_is_refused() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let mut path = folder.path().join("jobs.db");
    SqliteStore::open(&path, &SqliteOptions::default()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    if fs::OpenOptions::new().write(true).open(&path).is_ok() {
        // A privileged user may write anything but what the kernel itself keeps.
        path = "/sys/kernel/jobs.db".into();
    }
    assert_eq!(refused(&path), OpenError::PermissionDenied(path));
}

#[test]
fn a_database_that_another_program_keeps_locked_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.db");
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let waited = Duration::from_millis(20);
    assert_eq!(refused(&path), OpenError::Locked { path, waited });
}

/// The second of two tries, one in a batch that fails in part.
#[actix::test]
async fn a_request_that_fails_takes_no_other_with_it() {
    let t = Subject::sqlite();
    let [a] = register(&t.store, ["a"]).await;
    poison(&t.path());
    let poisoned = JobSpec { arguments: "\"poison\"".into(), ..spec(2) };
    let new_node = unclaimed(spec(5), "first-named-in-this-batch");
    let inserts = [
        vec![new_node],
        vec![claimed(1, &a)],
        vec![unclaimed(spec(3), "also-new"), unclaimed(poisoned, "also-new")],
        vec![unclaimed(spec(4), "also-new")],
    ];
    let inserts = inserts.map(|jobs| t.store.insert.send(Insert { owner: a.clone(), jobs }));
    let answers: Vec<_> = join_all(inserts).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers[0], Ok(vec![Inserted::Unclaimed]));
    assert_eq!(answers[1], Ok(vec![Inserted::Claimed(FencingToken(1))]));
    assert_eq!(answers[2], Err(StoreError::Failed(format!("{}: poison", t.path().display()))));
    assert_eq!(answers[3], Ok(vec![Inserted::Unclaimed]));
    let jobs = (1..=5).map(id).collect();
    let rows = ask(&t.store, Lookup { jobs }).await.unwrap();
    let found: Vec<_> = rows.iter().map(|row| (row.id, row.state)).collect();
    assert_eq!(
        found,
        [(id(1), JobState::Claimed), (id(4), JobState::Queued), (id(5), JobState::Queued)],
        "of the failed request nothing is left"
    );
    let affinities: i64 = Connection::open(t.path())
        .unwrap()
        .query_row("SELECT count(*) FROM job WHERE affinity = 'also-new'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(affinities, 1, "the name was made again after the failed request was undone");
}

fn poison(path: &Path) {
    Connection::open(path)
        .unwrap()
        .execute_batch(
            "CREATE TRIGGER poison BEFORE INSERT ON jobs WHEN NEW.arguments = '\"poison\"'
             BEGIN SELECT RAISE(ABORT, 'poison'); END",
        )
        .unwrap();
}

#[actix::test]
async fn a_transaction_that_fails_changes_nothing_and_says_why() {
    let clock = TestClock::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.db");
    let options = SqliteOptions {
        clock: clock.wall(),
        busy_wait: Duration::from_millis(1),
        ..SqliteOptions::default()
    };
    let (store, arbiter) = start_sqlite(&path, &options);
    let [a] = register(&store, ["a"]).await;

    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let inserts =
        (1..=3).map(|n| store.insert.send(Insert { owner: a.clone(), jobs: vec![claimed(n, &a)] }));
    for answer in join_all(inserts).await {
        let error = answer.unwrap().unwrap_err();
        assert_eq!(
            error,
            StoreError::Failed(format!(
                "{}: no turn to write among other processes: database is locked",
                path.display()
            ))
        );
        assert!(error.is_retryable());
    }
    assert_eq!(ask(&store, CountJobs).await.unwrap().total(), 0, "reading goes on");
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(
        insert(&store, &a, vec![claimed(1, &a)]).await,
        [Inserted::Claimed(FencingToken(1))]
    );
    ask(&store, Close).await;
    arbiter.stop();
}

/// What waits is bounded, every request is answered, and a lease operation behind the crowd is not
/// refused.
#[actix::test]
async fn a_flood_is_refused_at_a_bound_and_lease_operations_pass_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("jobs.db"), &SqliteOptions::default());
    // On this thread: the store sees no message before all have been sent.
    let store = StoreHandle::of(&store.unwrap().start());
    let [a] = register(&store, ["a"]).await;
    let text: Arc<str> = format!("\"{}\"", "x".repeat(1 << 20)).into();
    let big = |n| {
        let spec = JobSpec { arguments: text.clone(), ..spec(n) };
        Insert { owner: a.clone(), jobs: vec![unclaimed(spec, "a")] }
    };
    let inserts = join_all((0..200).map(|n| store.insert.send(big(n))));
    let renew = store.renew.send(Renew { owner: a.clone() });
    let (answers, renewed) = join(inserts, renew).await;
    assert_eq!(renewed.unwrap(), Ok(()));
    let (inserted, refused): (Vec<_>, Vec<_>) =
        answers.into_iter().map(Result::unwrap).partition(Result::is_ok);
    // Each is of 1,025 units. 64 of them fill the bound; then a batch of 4 is committed at once, and
    // makes room for 4.
    assert_eq!((inserted.len(), refused.len()), (68, 132));
    assert_eq!(refused[0], Err(StoreError::Busy("64 requests wait".into())));
    let total = ask(&store, CountJobs).await.unwrap().total();
    assert_eq!(total, 68, "what was refused is not there");
    ask(&store, Close).await;
}

#[actix::test]
async fn people_and_other_programs_read_the_view() {
    let t = Subject::sqlite();
    let [a, b] = register(&t.store, ["a", "b"]).await;
    let keyed = JobSpec { key: Some("k".into()), run_at_ms: START_MS + 9, ..spec(3) };
    insert(&t.store, &a, vec![claimed(1, &a), claimed(2, &a), unclaimed(keyed, "b")]).await;
    start(&t.store, &a, vec![claim(1, 1), claim(2, 1)]).await;
    let error = Disposition::Dead("no such file".into());
    let dead = Ended { claim: claim(2, 1), disposition: error };
    finish(&t.store, vec![succeeded(1, 1), dead]).await;
    drop(b);

    let connection = Connection::open(t.path()).unwrap();
    let mut statement = connection
        .prepare(
            "SELECT json_array(id, state, handler, json(arguments), json(result), error, key, tenant,
                 affinity, owner, attempts, finished_ms) FROM job ORDER BY id",
        )
        .unwrap();
    let rows: Vec<String> =
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    assert_eq!(
        rows,
        [
            format!(
                r#"["{}","succeeded","digest",{{"n":1}},1,null,null,"default","a","a",1,{START_MS}]"#,
                id(1)
            ),
            format!(
                r#"["{}","dead","digest",{{"n":2}},null,"no such file",null,"default","a","a",1,{START_MS}]"#,
                id(2)
            ),
            format!(
                r#"["{}","scheduled","digest",{{"n":3}},null,null,"k","default","b",null,0,null]"#,
                id(3)
            ),
        ]
    );
    let states: Vec<JobState> = JobState::ALL.to_vec();
    for state in states {
        let named: String = connection
            .query_row(
                &format!(
                    "SELECT state FROM (SELECT {} AS n) JOIN (
                         SELECT CASE {} {} END AS state)",
                    state.number(),
                    state.number(),
                    cases(&connection)
                ),
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(named, state.name());
    }
}

/// The `WHEN`s of the view, as the file has them.
fn cases(connection: &Connection) -> String {
    let sql: String = connection
        .query_row("SELECT sql FROM sqlite_schema WHERE name = 'job'", [], |row| row.get(0))
        .unwrap();
    let from = sql.find("WHEN").unwrap();
    let to = sql.find("END AS state").unwrap();
    sql[from..to].to_owned()
}

#[actix::test]
async fn a_lease_outlives_the_process_and_tokens_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.db");
    let options = SqliteOptions::default();
    let (store, arbiter) = start_sqlite(&path, &options);
    let [a] = register(&store, ["a"]).await;
    insert(&store, &a, vec![claimed(1, &a)]).await;
    ask(&store, Close).await;
    arbiter.stop();
    assert!(!path.with_extension("db-wal").exists(), "a closed store leaves one file");

    let (store, arbiter) = start_sqlite(&path, &options);
    let boot = Register { node: node("a"), at_least: Generation(0), gossip: None, over: None };
    let expected = Registered { generation: Generation(2), requeued: vec![id(1)], dead: vec![] };
    assert_eq!(ask(&store, boot).await, Ok(expected));
    assert_eq!(brief(&claim_due(&store, &owner("a", 2), 1).await), [(id(1), 3, 1)]);
    drop(store);
    arbiter.stop();
}
