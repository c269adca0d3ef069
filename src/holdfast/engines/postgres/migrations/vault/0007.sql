-- Who changed a task's state last and when, and until when its canary is watched.
ALTER TABLE redrives ADD COLUMN changed_at bigint NOT NULL DEFAULT 0;
ALTER TABLE redrives ADD COLUMN changed_by text NOT NULL DEFAULT '';
ALTER TABLE redrives ADD COLUMN watched_until bigint NOT NULL DEFAULT 0;
CREATE INDEX redrives_by_plan ON redrives (plan);
-- What can still be redriven of a group.
CREATE INDEX letters_captured_by_group ON letters (grp) WHERE state = 'captured';
