-- One file is one queue. An item's payload is written once, in `items`; where the item is in its life is a narrow row
-- in exactly one of `ready`, `leases`, `scheduled` and `dying`.
-- id = partition << 53 | sequence: a partition is a range of ids, and ids rise in the order of arrival.
-- The payload is the last column, so that the others are read without its overflow pages. Moments are microseconds.

CREATE TABLE items (
    id             INTEGER PRIMARY KEY,
    kind           TEXT NOT NULL,
    encoding       TEXT NOT NULL,
    reference      TEXT NOT NULL,
    dedupe_key     TEXT,
    source_id      TEXT,
    source_queue   TEXT,
    death_reason   TEXT,
    death_attempts INTEGER,
    died_at        INTEGER,
    payload        BLOB NOT NULL
);
CREATE UNIQUE INDEX items_by_dedupe_key ON items (dedupe_key) WHERE dedupe_key IS NOT NULL;
CREATE UNIQUE INDEX items_by_source_id ON items (source_id) WHERE source_id IS NOT NULL;
CREATE INDEX items_by_died_at ON items (died_at) WHERE died_at IS NOT NULL;

CREATE TABLE ready (
    id         INTEGER PRIMARY KEY,
    created_at INTEGER NOT NULL,
    expire_at  INTEGER NOT NULL,
    attempts   INTEGER NOT NULL
);
CREATE INDEX ready_by_expire_at ON ready (expire_at);
CREATE INDEX ready_by_attempts ON ready (attempts) WHERE attempts > 0;

CREATE TABLE leases (
    id             INTEGER PRIMARY KEY,
    created_at     INTEGER NOT NULL,
    expire_at      INTEGER NOT NULL,
    attempts       INTEGER NOT NULL,
    leased_at      INTEGER NOT NULL,
    lease_deadline INTEGER NOT NULL
);
CREATE INDEX leases_by_deadline ON leases (lease_deadline);

CREATE TABLE scheduled (
    id         INTEGER PRIMARY KEY,
    created_at INTEGER NOT NULL,
    expire_at  INTEGER NOT NULL,
    attempts   INTEGER NOT NULL,
    enqueue_at INTEGER NOT NULL
);
CREATE INDEX scheduled_by_enqueue_at ON scheduled (enqueue_at);

-- Marked as dying: the first of the three commits of a death. The target never changes.
CREATE TABLE dying (
    id                 INTEGER PRIMARY KEY,
    created_at         INTEGER NOT NULL,
    expire_at          INTEGER NOT NULL,
    attempts           INTEGER NOT NULL,
    reason             TEXT NOT NULL,
    died_at            INTEGER NOT NULL,
    target_queue       TEXT NOT NULL,
    target_generation  INTEGER NOT NULL,
    target_partition   INTEGER NOT NULL,
    target_storage     TEXT NOT NULL,
    target_expire_timeout INTEGER NOT NULL
);

-- What has arrived from a queue whose third commit is not known yet.
CREATE TABLE arrivals (
    source_id    TEXT PRIMARY KEY,
    source_queue TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX arrivals_by_source_queue ON arrivals (source_queue);

-- Counts are kept in memory and written when the file is closed. While it is open, `exact` is 0, the counts mean
-- nothing, and `last_sequence` is a reserve: no id beyond it has been given out. After a crash the rows are counted.
CREATE TABLE partitions (
    partition     INTEGER PRIMARY KEY,
    queued        INTEGER NOT NULL DEFAULT 0,
    leased        INTEGER NOT NULL DEFAULT 0,
    scheduled     INTEGER NOT NULL DEFAULT 0,
    dying         INTEGER NOT NULL DEFAULT 0,
    last_sequence INTEGER NOT NULL DEFAULT 0,
    exact         INTEGER NOT NULL DEFAULT 1
);

-- Append-only: what was deleted or dead-lettered, in the transaction that did it.
CREATE TABLE ledger (
    entry   INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    action  TEXT NOT NULL,
    item_id TEXT NOT NULL,
    reason  TEXT NOT NULL,
    count   INTEGER NOT NULL,
    detail  TEXT NOT NULL
);
CREATE TRIGGER ledger_is_not_changed BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_is_not_deleted BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
