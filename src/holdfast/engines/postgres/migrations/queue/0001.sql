-- All queues of a database. An item's payload is written once, in `items`; where the item is in its life is a narrow
-- row in exactly one of `ready`, `leases`, `scheduled` and `dying`. Moments are microseconds since 1970.
-- `queue` is a queue's generation: made anew, a queue has another, so that nothing of the old one can be met again.
-- Ids come from one sequence, whichever server asks: the order of ids is the one order of arrival.
--
-- A plan is made once and kept, often while the tables are still empty, where every index looks equally good. So no
-- statement is given a choice: `queue` leads to the index by id, `queue + 0` to the one by a moment; rows known by id
-- are fetched one by one (LATERAL … OFFSET 0, or id = ANY), and never by a join that could turn into a scan.

CREATE SEQUENCE holdfast.generations AS integer;
CREATE SEQUENCE holdfast.item_ids AS bigint;

-- One row. Its version rises in the transaction of every change of a queue, so that whoever sees it sees the change.
CREATE TABLE holdfast.catalog (
    version bigint NOT NULL
);
INSERT INTO holdfast.catalog (version) VALUES (1);

CREATE TABLE holdfast.queues (
    generation        integer PRIMARY KEY,
    name              text COLLATE "C" NOT NULL UNIQUE,
    dead_queue        text COLLATE "C" NOT NULL,
    dead_retention_us bigint NOT NULL,
    record            text NOT NULL
);
CREATE INDEX queues_by_dead_queue ON holdfast.queues (dead_queue) WHERE dead_queue <> '';

-- Queues whose row is gone and whose items are being removed, a bounded number at a time.
CREATE TABLE holdfast.dropped (
    generation integer PRIMARY KEY
);

CREATE TABLE holdfast.items (
    id             bigint PRIMARY KEY,
    queue          integer NOT NULL,
    partition      integer NOT NULL,
    death_attempts integer,
    died_at        bigint,
    kind           text NOT NULL,
    encoding       text NOT NULL,
    reference      text NOT NULL,
    dedupe_key     text COLLATE "C",
    source_id      text COLLATE "C",
    source_queue   text,
    death_reason   text,
    payload        bytea NOT NULL
);
CREATE UNIQUE INDEX items_by_dedupe_key ON holdfast.items (queue, dedupe_key) WHERE dedupe_key IS NOT NULL;
CREATE UNIQUE INDEX items_by_source_id ON holdfast.items (queue, source_id) WHERE source_id IS NOT NULL;
CREATE INDEX items_by_died_at ON holdfast.items (queue, died_at) WHERE died_at IS NOT NULL;
-- Payloads are compressed by whoever made them, or not at all: trying costs more than it saves.
ALTER TABLE holdfast.items ALTER COLUMN payload SET STORAGE EXTERNAL;

-- Rows of `ready` are inserted and deleted, never updated: a row that was locked is the row that was read.
CREATE TABLE holdfast.ready (
    id         bigint NOT NULL,
    created_at bigint NOT NULL,
    expire_at  bigint NOT NULL,
    queue      integer NOT NULL,
    partition  integer NOT NULL,
    attempts   integer NOT NULL,
    PRIMARY KEY (queue, partition, id)
);
CREATE INDEX ready_by_expire_at ON holdfast.ready ((queue + 0), expire_at);
CREATE INDEX ready_by_attempts ON holdfast.ready ((queue + 0), attempts) WHERE attempts > 0;

CREATE TABLE holdfast.leases (
    id             bigint PRIMARY KEY,
    created_at     bigint NOT NULL,
    expire_at      bigint NOT NULL,
    leased_at      bigint NOT NULL,
    lease_deadline bigint NOT NULL,
    queue          integer NOT NULL,
    partition      integer NOT NULL,
    attempts       integer NOT NULL
);
CREATE INDEX leases_by_deadline ON holdfast.leases (queue, lease_deadline);

CREATE TABLE holdfast.scheduled (
    id         bigint NOT NULL,
    created_at bigint NOT NULL,
    expire_at  bigint NOT NULL,
    enqueue_at bigint NOT NULL,
    queue      integer NOT NULL,
    partition  integer NOT NULL,
    attempts   integer NOT NULL,
    PRIMARY KEY (queue, partition, id)
);
CREATE INDEX scheduled_by_enqueue_at ON holdfast.scheduled ((queue + 0), enqueue_at);

-- Marked as dying: the first of the three commits of a death whose target is in another storage.
CREATE TABLE holdfast.dying (
    id                    bigint NOT NULL,
    created_at            bigint NOT NULL,
    expire_at             bigint NOT NULL,
    died_at               bigint NOT NULL,
    queue                 integer NOT NULL,
    partition             integer NOT NULL,
    attempts              integer NOT NULL,
    target_generation     integer NOT NULL,
    target_partition      integer NOT NULL,
    target_expire_timeout bigint NOT NULL,
    reason                text NOT NULL,
    target_queue          text NOT NULL,
    target_storage        text NOT NULL,
    PRIMARY KEY (queue, partition, id)
);

-- What has arrived from a queue whose third commit is not known yet.
CREATE TABLE holdfast.arrivals (
    queue        integer NOT NULL,
    source_id    text COLLATE "C" NOT NULL,
    source_queue text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, source_id)
);
CREATE INDEX arrivals_by_source_queue ON holdfast.arrivals ((queue + 0), source_queue);

CREATE TABLE holdfast.kept (
    key   text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);

-- Append-only: what was deleted or dead-lettered, in the transaction that did it. `queue` 0 is the catalog's own.
CREATE TABLE holdfast.ledger (
    entry      bigint GENERATED ALWAYS AS IDENTITY,
    at         bigint NOT NULL,
    queue      integer NOT NULL,
    count      bigint NOT NULL,
    action     text NOT NULL,
    queue_name text NOT NULL,
    item_id    text NOT NULL,
    reason     text NOT NULL,
    detail     text NOT NULL,
    PRIMARY KEY (queue, entry)
);
CREATE FUNCTION holdfast.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only';
END $$;
CREATE TRIGGER ledger_is_not_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON holdfast.ledger
    FOR EACH STATEMENT EXECUTE FUNCTION holdfast.refuse_change();

-- Rows live for seconds: vacuum by what has died, not by what share of the table that is.
ALTER TABLE holdfast.ready SET (fillfactor = 100, autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_scale_factor = 1.0, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE holdfast.leases SET (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_scale_factor = 1.0, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE holdfast.items SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 50000,
    autovacuum_vacuum_cost_delay = 1);
ALTER TABLE holdfast.scheduled SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 20000);

-- The moment of a transaction: a frozen clock's, or the database's, the same for every statement in it.
CREATE FUNCTION holdfast.moment_us(given bigint) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(given, (extract(epoch FROM transaction_timestamp()) * 1000000)::bigint)
$$;

-- Every write begins with this. Writers do not hold each other up, but a queue cannot be deleted beneath them.
CREATE FUNCTION holdfast.hold_queue(wanted bigint, given bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM holdfast.queues WHERE generation = wanted FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the queue is gone' USING ERRCODE = 'HF404';
    END IF;
    RETURN holdfast.moment_us(given);
END $$;
