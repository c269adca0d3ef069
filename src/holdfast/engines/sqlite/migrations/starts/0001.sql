-- Messages that were begun and not settled: one row for each start. Several processes may make the file at once.
CREATE TABLE IF NOT EXISTS starts (
    number   INTEGER PRIMARY KEY AUTOINCREMENT,
    queue    TEXT NOT NULL,
    key      BLOB NOT NULL,
    begun_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS starts_by_key ON starts (queue, key);
