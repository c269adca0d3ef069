-- What the ledger vouches for. A row from before has the digest 00; a program that knows of none can add no more.
ALTER TABLE ledger ADD COLUMN digest BLOB NOT NULL DEFAULT x'00';
CREATE TRIGGER ledger_is_of_today BEFORE INSERT ON ledger WHEN NEW.digest = x'00'
    BEGIN SELECT RAISE(ABORT, 'a newer Holdfast has this vault'); END;
ALTER TABLE letters ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE revisions ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE tokens ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE failed_imports ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
