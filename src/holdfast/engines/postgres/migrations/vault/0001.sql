-- The letters in custody: a narrow row to search by, and beside it what is large.
CREATE TABLE letters (
    id             bigint PRIMARY KEY,
    queue          text NOT NULL,
    origin         text NOT NULL,
    state          text NOT NULL,
    message_id     text NOT NULL,
    type           text NOT NULL,
    exchange       text NOT NULL,
    routing_key    text NOT NULL,
    source_queue   text NOT NULL,
    reason         text NOT NULL,
    death_count    bigint NOT NULL,
    first_died_at  bigint NOT NULL,
    died_at        bigint NOT NULL,
    error_type     text NOT NULL,
    error_message  text NOT NULL,
    grp            text NOT NULL,
    redrive_id     text NOT NULL,
    redriven_count bigint NOT NULL,
    revision       bigint NOT NULL DEFAULT 0,
    acked          bigint NOT NULL DEFAULT 0,
    captured_at    bigint NOT NULL,
    changed_at     bigint NOT NULL,
    body_bytes     bigint NOT NULL,
    digest         bytea NOT NULL,
    came_from      bigint NOT NULL DEFAULT 0
);
CREATE INDEX letters_by_queue ON letters (queue, id);
CREATE INDEX letters_by_state ON letters (state, id);
CREATE INDEX letters_by_queue_and_state ON letters (queue, state, id);
CREATE INDEX letters_by_type ON letters (type, id);
CREATE INDEX letters_by_group ON letters (grp, id);
-- Few at a time: what a redelivery is compared with.
CREATE INDEX letters_not_acked ON letters (queue, digest) WHERE acked = 0;
CREATE INDEX letters_redriven ON letters (changed_at) WHERE state = 'redriven';

CREATE TABLE contents (
    letter      bigint PRIMARY KEY,
    properties  bytea NOT NULL,
    blob        text NOT NULL,
    headers     text NOT NULL,
    shown       text NOT NULL,
    error_stack text NOT NULL,
    body        bytea NOT NULL
);

CREATE TABLE revisions (
    letter  bigint NOT NULL,
    number  bigint NOT NULL,
    headers text NOT NULL,
    dropped text NOT NULL,
    at      bigint NOT NULL,
    actor   text NOT NULL,
    note    text NOT NULL,
    body    bytea,
    PRIMARY KEY (letter, number)
);

CREATE TABLE failed_imports (
    id         bigint PRIMARY KEY,
    queue      text NOT NULL,
    reason     text NOT NULL,
    at         bigint NOT NULL,
    properties bytea NOT NULL,
    body       bytea NOT NULL
);

-- How many letters of a queue are in a state; `deleted` is what retention took.
CREATE TABLE tallies (
    queue text NOT NULL,
    state text NOT NULL,
    count bigint NOT NULL,
    PRIMARY KEY (queue, state)
);

CREATE TABLE counters (
    name  text PRIMARY KEY,
    value bigint NOT NULL
);

CREATE TABLE failure_groups (
    key      text PRIMARY KEY,
    title    text NOT NULL,
    count    bigint NOT NULL,
    first_at bigint NOT NULL,
    last_at  bigint NOT NULL,
    sample   bigint NOT NULL,
    status   text NOT NULL,
    note     text NOT NULL
);
CREATE UNIQUE INDEX groups_by_sample ON failure_groups (sample);

CREATE TABLE plans (
    hash     text PRIMARY KEY,
    document text NOT NULL,
    at       bigint NOT NULL
);

CREATE TABLE redrives (
    id         bigint PRIMARY KEY,
    operation  text NOT NULL UNIQUE,
    state      text NOT NULL,
    name       text NOT NULL,
    reason     text NOT NULL,
    plan       text NOT NULL,
    wish       text NOT NULL,
    total      bigint NOT NULL,
    started_at bigint NOT NULL,
    started_by text NOT NULL,
    why        text NOT NULL
);

CREATE TABLE redrive_letters (
    redrive     bigint NOT NULL,
    letter      bigint NOT NULL,
    redrive_id  text NOT NULL UNIQUE,
    address     text NOT NULL,
    status      text NOT NULL,
    lease_until bigint NOT NULL DEFAULT 0,
    why         text NOT NULL DEFAULT '',
    PRIMARY KEY (redrive, letter)
);
CREATE INDEX redrive_letters_by_status ON redrive_letters (redrive, status, letter);
CREATE INDEX redrive_letters_by_letter ON redrive_letters (letter);

CREATE TABLE ledger (
    number       bigint PRIMARY KEY,
    at           bigint NOT NULL,
    actor        text NOT NULL,
    action       text NOT NULL,
    origin       text NOT NULL,
    outcome      text NOT NULL,
    queue        text NOT NULL,
    from_state   text NOT NULL,
    to_state     text NOT NULL,
    count        bigint NOT NULL,
    letters      text NOT NULL,
    reason       text NOT NULL,
    detail       text NOT NULL,
    mac          bytea NOT NULL,
    first_letter bigint NOT NULL,
    last_letter  bigint NOT NULL
);
CREATE INDEX ledger_by_letters ON ledger (first_letter, last_letter) WHERE first_letter > 0;

CREATE TABLE tokens (
    name       text PRIMARY KEY,
    document   text NOT NULL,
    revoked_at bigint NOT NULL DEFAULT 0
);

CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$;
CREATE TRIGGER ledger_is_not_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger EXECUTE FUNCTION refuse();

CREATE TABLE letters_text (
    letter bigint PRIMARY KEY,
    words  tsvector NOT NULL
);
CREATE INDEX letters_text_by_words ON letters_text USING gin (words);
