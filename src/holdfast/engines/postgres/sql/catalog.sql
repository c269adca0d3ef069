-- name: catalog_count_items
SELECT (SELECT count(*) FROM holdfast.ready WHERE queue = $1::bigint)
    + (SELECT count(*) FROM holdfast.leases WHERE queue = $1::bigint)
    + (SELECT count(*) FROM holdfast.scheduled WHERE queue = $1::bigint)
    + (SELECT count(*) FROM holdfast.dying WHERE queue = $1::bigint)

-- name: catalog_delete_queue
WITH gone AS (
    DELETE FROM holdfast.queues WHERE generation = $1::bigint RETURNING generation
)
INSERT INTO holdfast.dropped (generation) SELECT generation FROM gone ON CONFLICT DO NOTHING

-- name: catalog_find_kept
SELECT value FROM holdfast.kept WHERE key = $1::text

-- name: catalog_find_queue
SELECT generation, record FROM holdfast.queues WHERE name = $1::text AND record <> ''

-- name: catalog_hold_queue
-- Waits for the writers of the queue; none can begin before this transaction ends.
SELECT 1 FROM holdfast.queues WHERE generation = $1::bigint FOR UPDATE

-- name: catalog_insert_queue
INSERT INTO holdfast.queues (generation, name, dead_queue, dead_retention_us, record)
VALUES (nextval('holdfast.generations'), $1::text, $2::text, $3::bigint, $4::text)
RETURNING generation

-- name: catalog_keep
INSERT INTO holdfast.kept (key, value) VALUES ($1::text, $2::text) ON CONFLICT DO NOTHING

-- name: catalog_lock
-- Changes of queues are decided one after the other, from whichever server.
SELECT holdfast.moment_us($1::bigint) FROM pg_advisory_xact_lock(1212106564, -1)

-- name: catalog_raise_version
UPDATE holdfast.catalog SET version = version + 1

-- name: catalog_read_version
SELECT version FROM holdfast.catalog

-- name: catalog_select_queues
SELECT generation, record FROM holdfast.queues WHERE record <> '' ORDER BY name

-- name: catalog_select_sources
SELECT name FROM holdfast.queues WHERE dead_queue = $1::text AND dead_queue <> '' ORDER BY name

-- name: catalog_update_queue
UPDATE holdfast.queues SET dead_queue = $2::text, dead_retention_us = $3::bigint, record = $4::text
WHERE generation = $1::bigint
