-- The queues of a folder. A generation is never used again: AUTOINCREMENT keeps it so after the row is gone.
CREATE TABLE queues (
    generation INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT NOT NULL UNIQUE,
    dead_queue TEXT NOT NULL,
    record     TEXT NOT NULL
);
CREATE INDEX queues_by_dead_queue ON queues (dead_queue) WHERE dead_queue <> '';

-- Which queue files have been made (a missing one is then an error, not a new queue), and which may be removed.
CREATE TABLE files (
    generation INTEGER PRIMARY KEY,
    doomed     INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE kept (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE ledger (
    entry      INTEGER PRIMARY KEY AUTOINCREMENT,
    at         INTEGER NOT NULL,
    action     TEXT NOT NULL,
    queue_name TEXT NOT NULL,
    item_id    TEXT NOT NULL,
    reason     TEXT NOT NULL,
    count      INTEGER NOT NULL,
    detail     TEXT NOT NULL
);
CREATE TRIGGER ledger_is_not_changed BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_is_not_deleted BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
