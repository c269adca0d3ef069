-- Collected results of one process. Moments are microseconds since 1970; `owner` and `fence` are those of the lease.
CREATE TABLE transactions (
    id             TEXT PRIMARY KEY,
    state          TEXT NOT NULL,
    producer       TEXT NOT NULL,
    notify         TEXT NOT NULL,
    series         TEXT,
    reason         TEXT NOT NULL DEFAULT '',
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    progress_at    INTEGER NOT NULL,
    owner          TEXT NOT NULL DEFAULT '',
    fence          INTEGER NOT NULL DEFAULT 1,
    is_clean       INTEGER NOT NULL DEFAULT 0,
    lease_deadline INTEGER NOT NULL DEFAULT 0,
    request        BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX transactions_unfinished ON transactions (id) WHERE is_clean = 0;

CREATE TABLE parts (
    transaction_id TEXT NOT NULL,
    series         TEXT NOT NULL,
    ordinal        INTEGER NOT NULL,
    path           TEXT NOT NULL,
    size_bytes     INTEGER NOT NULL,
    sha256         TEXT NOT NULL,
    PRIMARY KEY (transaction_id, series, ordinal)
) WITHOUT ROWID;

-- What `parts` adds up to, kept in the commit of every change to it, and what the headers said.
CREATE TABLE series (
    transaction_id TEXT NOT NULL,
    series         TEXT NOT NULL,
    count          INTEGER,
    series_count   INTEGER,
    stored_count   INTEGER NOT NULL DEFAULT 0,
    stored_bytes   INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (transaction_id, series)
) WITHOUT ROWID;

CREATE TABLE strays (
    transaction_id TEXT NOT NULL,
    path           TEXT NOT NULL,
    PRIMARY KEY (transaction_id, path)
) WITHOUT ROWID;

CREATE TABLE ledger (
    number         INTEGER PRIMARY KEY,
    at             INTEGER NOT NULL,
    transaction_id TEXT NOT NULL,
    action         TEXT NOT NULL,
    reason         TEXT NOT NULL,
    detail         TEXT NOT NULL
);
