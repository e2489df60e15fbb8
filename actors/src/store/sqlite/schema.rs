//! The tables of a meshwork database, one migration a version.
//!
//! `jobs` is append-only and holds what never changes; `job_states` is narrow and holds what does,
//! under the same `seq`. A number in column `state` is that of
//! [`JobState`](meshwork_protocol::job::JobState); the partial indexes spell the numbers out, and so
//! must each statement that is to use them. People and other programs read the view `job`.

/// `PRAGMA application_id` of a meshwork database: "MESH".
pub(super) const APPLICATION_ID: i32 = 0x4d45_5348;

/// The migrations, in order. The first makes version 1 of an empty database; `PRAGMA user_version`
/// is how many have run.
pub(super) const MIGRATIONS: [&str; 1] = [VERSION_1];

const VERSION_1: &str = "
-- A node, by name, with the lease of its newest boot. A node that was only named, as an affinity,
-- has generation 0.
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    generation INTEGER NOT NULL DEFAULT 0,
    renewals INTEGER NOT NULL DEFAULT 0,
    reaped INTEGER NOT NULL DEFAULT 1,
    gossip TEXT
) STRICT;

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    handler TEXT NOT NULL,
    arguments TEXT NOT NULL,
    key TEXT,
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    run_at_ms INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    origin TEXT NOT NULL,
    enqueued_ms INTEGER NOT NULL
) STRICT;

-- `affinity` and `owner` are seqs of nodes. `owner` holds a claimed or running job, and stays on
-- record when it has brought the job to an end. `due_ms` is when the job became due, or will.
CREATE TABLE job_states (
    seq INTEGER PRIMARY KEY,
    state INTEGER NOT NULL,
    affinity INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    owner INTEGER,
    token INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    finished_ms INTEGER,
    error TEXT,
    result TEXT
) STRICT;

-- Queued. The affinity leads: as a filter over jobs of other nodes it would cost a claim a scan of
-- all of them.
CREATE INDEX due_of ON job_states (affinity, priority DESC, due_ms) WHERE state = 1;
CREATE INDEX due ON job_states (priority DESC, due_ms) WHERE state = 1;
-- Scheduled and failed: not among the due ones, where a claim would have to pass them by.
CREATE INDEX later ON job_states (due_ms) WHERE state IN (0, 5);
-- Claimed and running.
CREATE INDEX held ON job_states (owner) WHERE state IN (2, 3);

CREATE VIEW job AS
SELECT
    lower(
        substr(hex(j.id), 1, 8) || '-' || substr(hex(j.id), 9, 4) || '-' ||
        substr(hex(j.id), 13, 4) || '-' || substr(hex(j.id), 17, 4) || '-' ||
        substr(hex(j.id), 21, 12)
    ) AS id,
    CASE s.state
        WHEN 0 THEN 'scheduled' WHEN 1 THEN 'queued' WHEN 2 THEN 'claimed' WHEN 3 THEN 'running'
        WHEN 4 THEN 'succeeded' WHEN 5 THEN 'failed' WHEN 6 THEN 'dead' WHEN 7 THEN 'cancelled'
    END AS state,
    j.handler, j.arguments, s.result, s.error, j.key, j.tenant, j.priority,
    s.attempts, j.max_attempts, s.crashes,
    j.origin, a.id AS affinity, o.id AS owner, s.token, j.pinned,
    j.enqueued_ms, s.due_ms, s.finished_ms
FROM jobs j
JOIN job_states s USING (seq)
JOIN nodes a ON a.seq = s.affinity
LEFT JOIN nodes o ON o.seq = s.owner;
";
