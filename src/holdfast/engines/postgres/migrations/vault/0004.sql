-- What the ledger vouches for. A row from before has the digest 00; a program that knows of none can add no more.
ALTER TABLE ledger ADD COLUMN digest bytea NOT NULL DEFAULT '\x00';
ALTER TABLE ledger ALTER COLUMN digest DROP DEFAULT;
ALTER TABLE letters ADD COLUMN seal bytea NOT NULL DEFAULT '';
ALTER TABLE revisions ADD COLUMN seal bytea NOT NULL DEFAULT '';
ALTER TABLE tokens ADD COLUMN seal bytea NOT NULL DEFAULT '';
ALTER TABLE failed_imports ADD COLUMN seal bytea NOT NULL DEFAULT '';
