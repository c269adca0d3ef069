-- Blobs that no letter has yet, or has any more; a doomed one is being deleted and can be claimed by nobody.
CREATE TABLE loose_blobs (
    blob   TEXT PRIMARY KEY,
    due_at INTEGER NOT NULL,
    doomed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX loose_blobs_by_due_at ON loose_blobs (due_at);
CREATE INDEX contents_by_blob ON contents (blob) WHERE blob <> '';
