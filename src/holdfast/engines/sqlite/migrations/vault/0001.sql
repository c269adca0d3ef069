-- The letters in custody: a narrow row to search by, and beside it what is large.
CREATE TABLE letters (
    id             INTEGER PRIMARY KEY,
    queue          TEXT NOT NULL,
    origin         TEXT NOT NULL,
    state          TEXT NOT NULL,
    message_id     TEXT NOT NULL,
    type           TEXT NOT NULL,
    exchange       TEXT NOT NULL,
    routing_key    TEXT NOT NULL,
    source_queue   TEXT NOT NULL,
    reason         TEXT NOT NULL,
    death_count    INTEGER NOT NULL,
    first_died_at  INTEGER NOT NULL,
    died_at        INTEGER NOT NULL,
    error_type     TEXT NOT NULL,
    error_message  TEXT NOT NULL,
    grp            TEXT NOT NULL,
    redrive_id     TEXT NOT NULL,
    redriven_count INTEGER NOT NULL,
    revision       INTEGER NOT NULL DEFAULT 0,
    acked          INTEGER NOT NULL DEFAULT 0,
    captured_at    INTEGER NOT NULL,
    changed_at     INTEGER NOT NULL,
    body_bytes     INTEGER NOT NULL,
    digest         BLOB NOT NULL,
    came_from      INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX letters_by_queue ON letters (queue);
CREATE INDEX letters_by_state ON letters (state);
CREATE INDEX letters_by_queue_and_state ON letters (queue, state);
CREATE INDEX letters_by_type ON letters (type);
CREATE INDEX letters_by_group ON letters (grp);
-- Few at a time: what a redelivery is compared with.
CREATE INDEX letters_not_acked ON letters (queue, digest) WHERE acked = 0;
CREATE INDEX letters_redriven ON letters (changed_at) WHERE state = 'redriven';

CREATE TABLE contents (
    letter      INTEGER PRIMARY KEY,
    properties  BLOB NOT NULL,
    blob        TEXT NOT NULL,
    headers     TEXT NOT NULL,
    shown       TEXT NOT NULL,
    error_stack TEXT NOT NULL,
    body        BLOB NOT NULL
);

CREATE TABLE revisions (
    letter  INTEGER NOT NULL,
    number  INTEGER NOT NULL,
    headers TEXT NOT NULL,
    dropped TEXT NOT NULL,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    note    TEXT NOT NULL,
    body    BLOB,
    PRIMARY KEY (letter, number)
);

CREATE TABLE failed_imports (
    id         INTEGER PRIMARY KEY,
    queue      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    at         INTEGER NOT NULL,
    properties BLOB NOT NULL,
    body       BLOB NOT NULL
);

-- How many letters of a queue are in a state; `deleted` is what retention took.
CREATE TABLE tallies (
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, state)
);

CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
);

CREATE TABLE failure_groups (
    key      TEXT PRIMARY KEY,
    title    TEXT NOT NULL,
    count    INTEGER NOT NULL,
    first_at INTEGER NOT NULL,
    last_at  INTEGER NOT NULL,
    sample   INTEGER NOT NULL,
    status   TEXT NOT NULL,
    note     TEXT NOT NULL
);
CREATE UNIQUE INDEX groups_by_sample ON failure_groups (sample);

CREATE TABLE plans (
    hash     TEXT PRIMARY KEY,
    document TEXT NOT NULL,
    at       INTEGER NOT NULL
);

CREATE TABLE redrives (
    id         INTEGER PRIMARY KEY,
    operation  TEXT NOT NULL UNIQUE,
    state      TEXT NOT NULL,
    name       TEXT NOT NULL,
    reason     TEXT NOT NULL,
    plan       TEXT NOT NULL,
    wish       TEXT NOT NULL,
    total      INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    started_by TEXT NOT NULL,
    why        TEXT NOT NULL
);

CREATE TABLE redrive_letters (
    redrive     INTEGER NOT NULL,
    letter      INTEGER NOT NULL,
    redrive_id  TEXT NOT NULL UNIQUE,
    address     TEXT NOT NULL,
    status      TEXT NOT NULL,
    lease_until INTEGER NOT NULL DEFAULT 0,
    why         TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (redrive, letter)
);
CREATE INDEX redrive_letters_by_status ON redrive_letters (redrive, status, letter);
CREATE INDEX redrive_letters_by_letter ON redrive_letters (letter);

CREATE TABLE ledger (
    number       INTEGER PRIMARY KEY,
    at           INTEGER NOT NULL,
    actor        TEXT NOT NULL,
    action       TEXT NOT NULL,
    origin       TEXT NOT NULL,
    outcome      TEXT NOT NULL,
    queue        TEXT NOT NULL,
    from_state   TEXT NOT NULL,
    to_state     TEXT NOT NULL,
    count        INTEGER NOT NULL,
    letters      TEXT NOT NULL,
    reason       TEXT NOT NULL,
    detail       TEXT NOT NULL,
    mac          BLOB NOT NULL,
    first_letter INTEGER NOT NULL,
    last_letter  INTEGER NOT NULL
);
CREATE INDEX ledger_by_letters ON ledger (first_letter, last_letter) WHERE first_letter > 0;

CREATE TABLE tokens (
    name       TEXT PRIMARY KEY,
    document   TEXT NOT NULL,
    revoked_at INTEGER NOT NULL DEFAULT 0
);

CREATE TRIGGER ledger_is_not_changed BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_is_not_deleted BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

-- Without the text itself: it is in the body, and only what was found is looked up.
CREATE VIRTUAL TABLE letters_text USING fts5(text, content='', contentless_delete=1, detail=none);
