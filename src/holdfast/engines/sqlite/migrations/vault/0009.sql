-- The last recoveries that ended: a line of each for lists, and beside it all that is told of it.
CREATE TABLE recoveries (
    id       INTEGER PRIMARY KEY,
    run      TEXT NOT NULL UNIQUE,
    line     TEXT NOT NULL,
    document TEXT NOT NULL
);
