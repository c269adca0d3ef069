-- The last recoveries that ended: a line of each for lists, and beside it all that is told of it.
CREATE TABLE recoveries (
    id       bigint PRIMARY KEY,
    run      text NOT NULL UNIQUE,
    line     text NOT NULL,
    document text NOT NULL
);
