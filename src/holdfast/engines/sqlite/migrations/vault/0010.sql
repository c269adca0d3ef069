-- What became of the letters of tasks that do not run, so that a list of them counts none; and how many came back.
CREATE TABLE redrive_tallies (
    redrive INTEGER NOT NULL,
    status  TEXT NOT NULL,
    count   INTEGER NOT NULL,
    PRIMARY KEY (redrive, status)
);
INSERT INTO redrive_tallies (redrive, status, count)
SELECT r.redrive, r.status, count(*) FROM redrives t JOIN redrive_letters r ON r.redrive = t.id
WHERE t.state <> 'running' GROUP BY r.redrive, r.status;
INSERT INTO redrive_tallies (redrive, status, count)
SELECT r.redrive, 'came_back', count(*) FROM letters l JOIN redrive_letters r ON r.letter = l.id
WHERE l.state = 'came_back' AND r.status NOT IN ('failed', 'skipped') GROUP BY r.redrive;
