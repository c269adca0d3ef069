-- Collected results that several collectors share. Moments are microseconds since 1970, by the database's own clock.
-- Every write of an owner begins with an update of its row here, under its fence: a former owner finds no row.
CREATE TABLE holdfast.collect_transactions (
    id             text COLLATE "C" PRIMARY KEY,
    state          text NOT NULL,
    producer       text NOT NULL,
    notify         text NOT NULL,
    series         text,
    reason         text NOT NULL DEFAULT '',
    created_at     bigint NOT NULL,
    updated_at     bigint NOT NULL,
    progress_at    bigint NOT NULL,
    owner          text NOT NULL DEFAULT '',
    fence          bigint NOT NULL DEFAULT 1,
    is_clean       boolean NOT NULL DEFAULT false,
    lease_deadline bigint NOT NULL DEFAULT 0,
    request        bytea NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX collect_unfinished ON holdfast.collect_transactions (id) WHERE NOT is_clean;

CREATE TABLE holdfast.collect_parts (
    transaction_id text COLLATE "C" NOT NULL,
    series         text COLLATE "C" NOT NULL,
    ordinal        bigint NOT NULL,
    path           text NOT NULL,
    size_bytes     bigint NOT NULL,
    sha256         text NOT NULL,
    PRIMARY KEY (transaction_id, series, ordinal)
);

-- What the parts add up to, kept in the transaction of every change to them, and what the headers said.
CREATE TABLE holdfast.collect_series (
    transaction_id text COLLATE "C" NOT NULL,
    series         text COLLATE "C" NOT NULL,
    count          bigint,
    series_count   bigint,
    stored_count   bigint NOT NULL DEFAULT 0,
    stored_bytes   bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (transaction_id, series)
) WITH (fillfactor = 50);

CREATE TABLE holdfast.collect_strays (
    transaction_id text COLLATE "C" NOT NULL,
    path           text NOT NULL,
    PRIMARY KEY (transaction_id, path)
);

CREATE TABLE holdfast.collect_ledger (
    number         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             bigint NOT NULL,
    transaction_id text NOT NULL,
    action         text NOT NULL,
    reason         text NOT NULL,
    detail         text NOT NULL
);

CREATE FUNCTION holdfast.collect_now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;
