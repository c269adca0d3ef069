-- What happened in each hour (of the epoch), for charts: letters by queue, and arrivals by group.
CREATE TABLE queue_hours (
    hour      INTEGER NOT NULL,
    queue     TEXT NOT NULL,
    arrived   INTEGER NOT NULL,
    redriven  INTEGER NOT NULL,
    came_back INTEGER NOT NULL,
    PRIMARY KEY (hour, queue)
) WITHOUT ROWID;
CREATE TABLE group_hours (
    grp     TEXT NOT NULL,
    hour    INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    PRIMARY KEY (grp, hour)
) WITHOUT ROWID;
CREATE INDEX group_hours_by_hour ON group_hours (hour);
INSERT INTO queue_hours (hour, queue, arrived, redriven, came_back)
SELECT at / 3600000000, queue,
    sum(CASE WHEN from_state = '' THEN count ELSE 0 END),
    sum(CASE WHEN to_state = 'redriven' THEN count ELSE 0 END),
    sum(CASE WHEN to_state = 'came_back' THEN count ELSE 0 END)
FROM ledger WHERE to_state <> '' AND (from_state = '' OR to_state IN ('redriven', 'came_back'))
GROUP BY at / 3600000000, queue;
INSERT INTO group_hours (grp, hour, arrived)
SELECT grp, captured_at / 3600000000, count(*) FROM letters GROUP BY grp, captured_at / 3600000000;
