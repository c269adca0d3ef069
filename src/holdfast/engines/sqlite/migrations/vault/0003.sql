-- Who runs a task, until when that is so unless he says it again; and which letters were published more than once, maybe.
ALTER TABLE redrives ADD COLUMN holder TEXT NOT NULL DEFAULT '';
ALTER TABLE redrives ADD COLUMN held_until INTEGER NOT NULL DEFAULT 0;
ALTER TABLE redrive_letters ADD COLUMN repeated INTEGER NOT NULL DEFAULT 0;
CREATE INDEX redrive_letters_repeated ON redrive_letters (redrive) WHERE repeated = 1;
