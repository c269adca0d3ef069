-- name: adopt_queue
-- A queue whose catalog is in another storage: its generation is held here from its first use until it is dropped.
INSERT INTO holdfast.queues (generation, name, dead_queue, dead_retention_us, record)
SELECT $1::bigint, $2::text, '', 0, ''
WHERE NOT EXISTS (SELECT 1 FROM holdfast.dropped WHERE generation = $1::bigint)
ON CONFLICT (generation) DO NOTHING

-- name: clear_leases
WITH picked AS (
    SELECT id FROM holdfast.leases WHERE queue = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY lease_deadline LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (SELECT id FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: clear_ready
WITH picked AS (
    SELECT ctid AS place FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint
    ORDER BY id LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: clear_scheduled
WITH picked AS (
    SELECT ctid AS place FROM holdfast.scheduled WHERE queue = $1::bigint AND partition = $2::bigint
    ORDER BY id LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.scheduled WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: complete_items
-- All of $3 or none: $4 is how many there must be. Of a refused one, what is leased and what is queued.
WITH held AS (
    SELECT id FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), whole AS (
    SELECT count(*) = $4::bigint AS yes FROM held
), settled AS (
    DELETE FROM holdfast.leases WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
)
SELECT yes,
    CASE WHEN NOT yes THEN ARRAY (SELECT id FROM held) END,
    CASE WHEN NOT yes THEN ARRAY (
        SELECT queued.id FROM unnest($3::bigint[]) AS wanted (id) CROSS JOIN LATERAL (
            SELECT id FROM holdfast.ready
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id OFFSET 0) AS queued) END
FROM whole

-- name: count_ready
-- At most $3: an estimate that went wrong is put right without counting a million rows.
SELECT count(*) FROM (
    SELECT 1 FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint LIMIT $3::bigint) AS found

-- name: delete_in_sight
-- By id, queued, leased or scheduled; unknown ids are skipped. The table's first letter tells which count sinks.
WITH wanted AS (
    SELECT unnest($3::bigint[]) AS id
), leased AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (
        SELECT id FROM holdfast.leases
        WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
        ORDER BY id FOR UPDATE))
    RETURNING id
), queued AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (
        SELECT found.place FROM wanted CROSS JOIN LATERAL (
            SELECT ctid AS place FROM holdfast.ready
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found))
    RETURNING id
), scheduled AS (
    DELETE FROM holdfast.scheduled WHERE ctid = ANY (ARRAY (
        SELECT found.place FROM wanted CROSS JOIN LATERAL (
            SELECT ctid AS place FROM holdfast.scheduled
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found))
    RETURNING id
), gone AS (
    SELECT 'l' AS place, id FROM leased UNION ALL SELECT 'q', id FROM queued UNION ALL SELECT 's', id FROM scheduled
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT place, id FROM gone ORDER BY id

-- name: delete_items
DELETE FROM holdfast.items WHERE id = ANY ($1::bigint[])

-- name: drop_arrivals
DELETE FROM holdfast.arrivals WHERE queue = $1::bigint

-- name: drop_done
DELETE FROM holdfast.dropped WHERE generation = $1::bigint

-- name: drop_dying
-- A bounded number of what is left of a deleted queue; nobody can reach it any more.
WITH picked AS (
    SELECT ctid AS place FROM holdfast.dying WHERE queue = $1::bigint LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.dying WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: drop_elder_queues
-- The same name under another generation was deleted in its catalog before it could be dropped here.
WITH gone AS (
    DELETE FROM holdfast.queues WHERE name = $2::text AND generation <> $1::bigint AND record = '' RETURNING generation
)
INSERT INTO holdfast.dropped (generation) SELECT generation FROM gone ON CONFLICT DO NOTHING

-- name: drop_leases
-- A bounded number of what is left of a deleted queue; nobody can reach it any more.
WITH picked AS (
    SELECT ctid AS place FROM holdfast.leases WHERE queue = $1::bigint LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.leases WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: drop_ready
-- A bounded number of what is left of a deleted queue; nobody can reach it any more.
WITH picked AS (
    SELECT ctid AS place FROM holdfast.ready WHERE queue = $1::bigint LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: drop_scheduled
-- A bounded number of what is left of a deleted queue; nobody can reach it any more.
WITH picked AS (
    SELECT ctid AS place FROM holdfast.scheduled WHERE queue = $1::bigint LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.scheduled WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone

-- name: extend_leases
-- All of $3 or none: $4 is how many there must be. $5 moment or null, $6 lease timeout.
WITH held AS (
    SELECT id FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), whole AS (
    SELECT count(*) = $4::bigint AS yes FROM held
), extended AS (
    UPDATE holdfast.leases SET lease_deadline = (SELECT holdfast.moment_us($5::bigint) + $6::bigint)
    WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
)
SELECT yes,
    CASE WHEN NOT yes THEN ARRAY (SELECT id FROM held) END,
    CASE WHEN NOT yes THEN ARRAY (
        SELECT queued.id FROM unnest($3::bigint[]) AS wanted (id) CROSS JOIN LATERAL (
            SELECT id FROM holdfast.ready
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id OFFSET 0) AS queued) END
FROM whole

-- name: find_dedupe_keys
SELECT items.dedupe_key, items.id, items.partition
FROM unnest($2::text[]) AS wanted (dedupe_key) CROSS JOIN LATERAL (
    SELECT dedupe_key, id, partition FROM holdfast.items
    WHERE queue = $1::bigint AND items.dedupe_key = wanted.dedupe_key AND items.dedupe_key IS NOT NULL OFFSET 0) AS items

-- name: find_ready
SELECT queued.id FROM unnest($3::bigint[]) AS wanted (id) CROSS JOIN LATERAL (
    SELECT id FROM holdfast.ready
    WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id OFFSET 0) AS queued

-- name: forget_arrivals
DELETE FROM holdfast.arrivals WHERE ctid = ANY (ARRAY (
    SELECT known.place FROM unnest($2::text[]) AS wanted (source_id) CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.arrivals
        WHERE queue = $1::bigint AND arrivals.source_id = wanted.source_id OFFSET 0) AS known))

-- name: free_keys
UPDATE holdfast.items SET former_key = coalesce(dedupe_key, former_key), dedupe_key = NULL, source_id = NULL
WHERE id = ANY ($1::bigint[]) AND coalesce(dedupe_key, source_id) IS NOT NULL

-- name: hold_queue
SELECT holdfast.hold_queue($1::bigint, $2::bigint)

-- name: hold_target
-- Whether the dead queue is still there; if so, it cannot be deleted before this transaction ends.
SELECT 1 FROM holdfast.queues WHERE generation = $1::bigint FOR KEY SHARE

-- name: import_items
-- Items with their story. One whose dedupe key or source id is here already is left out of the answer.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.* FROM unnest(
        $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::bigint[],
        $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[], $17::bigint[], $18::bytea[], $20::text[],
        $21::bigint[]
    ) WITH ORDINALITY AS given (
        kind, encoding, reference, dedupe_key, source_id, source_queue, death_reason, death_attempts,
        died_at, created_at, expire_at, enqueue_at, attempts, payload, former_key, lease_deadline, position)
), inserted AS (
    INSERT INTO holdfast.items (id, queue, partition, kind, encoding, reference, dedupe_key, source_id, source_queue,
        death_reason, death_attempts, died_at, payload, former_key)
    SELECT id, $1::bigint, $2::bigint, kind, encoding, reference, dedupe_key, source_id, source_queue,
        death_reason, nullif(death_attempts, 0), nullif(died_at, 0), payload, former_key
    FROM numbered ORDER BY id
    ON CONFLICT DO NOTHING
    RETURNING id
), placed AS (
    SELECT numbered.id, numbered.position, numbered.attempts, numbered.enqueue_at,
        coalesce(nullif(numbered.created_at, 0), (SELECT now FROM clock)) AS created_at,
        coalesce(nullif(numbered.expire_at, 0), (SELECT now + $4::bigint FROM clock)) AS expire_at,
        numbered.enqueue_at >= (SELECT now + $19::bigint FROM clock)
            AND numbered.lease_deadline <= (SELECT now FROM clock) AS is_scheduled,
        CASE WHEN numbered.lease_deadline > (SELECT now FROM clock) THEN numbered.lease_deadline ELSE 0 END AS leased_until
    FROM inserted JOIN numbered ON numbered.id = inserted.id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, created_at, expire_at, $1::bigint, $2::bigint, attempts FROM placed
    WHERE NOT is_scheduled AND leased_until = 0
), scheduled AS (
    INSERT INTO holdfast.scheduled (id, created_at, expire_at, enqueue_at, queue, partition, attempts)
    SELECT id, created_at, expire_at, enqueue_at, $1::bigint, $2::bigint, attempts FROM placed WHERE is_scheduled
), leased AS (
    INSERT INTO holdfast.leases (id, created_at, expire_at, leased_at, lease_deadline, queue, partition, attempts)
    SELECT id, created_at, expire_at, (SELECT now FROM clock), leased_until, $1::bigint, $2::bigint, attempts
    FROM placed WHERE leased_until > 0
)
SELECT position, id, is_scheduled, created_at, expire_at, leased_until FROM placed ORDER BY position

-- name: insert_dying
-- The first commit of a death: $3 moment or null, $4 ids, then created_at, expire_at, attempts; $8 reason; $9 the target.
INSERT INTO holdfast.dying (id, created_at, expire_at, attempts, died_at, queue, partition, reason,
    target_queue, target_storage, target_generation, target_partition, target_expire_timeout)
SELECT given.id, given.created_at, given.expire_at, given.attempts, holdfast.moment_us($3::bigint),
    $1::bigint, $2::bigint, $8::text, $9::text, $10::text, $11::bigint, $12::bigint, $13::bigint
FROM unnest($4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]) AS given (id, created_at, expire_at, attempts)

-- name: insert_ledger
-- $1 queue, $2 its name, $3 moment or null, $4 action, $5 item ids, $6 reasons, $7 count of each, $8 detail.
INSERT INTO holdfast.ledger (at, queue, queue_name, action, item_id, reason, count, detail)
SELECT holdfast.moment_us($3::bigint), $1::bigint, $2::text, $4::text, given.item_id, given.reason, $7::bigint, $8::text
FROM unnest($5::text[], $6::text[]) AS given (item_id, reason)

-- name: lease_items
-- $3 moment or null, $4 how many, $5 from which id on, $6 lease timeout, $7 whether expiry counts,
-- $8 attempts ceiling, $9 what every moment is after.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), picked AS (
    SELECT id, created_at, expire_at, attempts, ctid AS place FROM holdfast.ready
    WHERE queue = $1::bigint AND partition = $2::bigint AND id >= $5::bigint
        AND expire_at + 0 > (SELECT CASE WHEN $7::bigint = 1 THEN now ELSE $9::bigint END FROM clock) AND attempts + 0 < $8::bigint
    ORDER BY id LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked))
), leased AS (
    INSERT INTO holdfast.leases (id, created_at, expire_at, leased_at, lease_deadline, queue, partition, attempts)
    SELECT id, created_at, expire_at, (SELECT now FROM clock), (SELECT now + $6::bigint FROM clock),
        $1::bigint, $2::bigint, attempts + 1
    FROM picked
)
SELECT picked.id, picked.attempts + 1, body.payload, body.encoding, body.kind, body.reference, body.first_id
FROM picked CROSS JOIN LATERAL (
    SELECT payload, encoding, kind, reference, first_id FROM holdfast.items WHERE items.id = picked.id OFFSET 0) AS body
ORDER BY picked.id

-- name: list_items
-- Queued and leased items by id: $3 from which on, $4 how many.
SELECT items.id, state.attempts, state.created_at, state.expire_at, state.lease_deadline, 0::bigint,
    items.kind, items.encoding, items.reference, items.payload, items.dedupe_key, items.source_id,
    items.source_queue, items.death_reason, items.death_attempts, items.died_at, items.former_key
FROM (
    (SELECT id, attempts, created_at, expire_at, 0::bigint AS lease_deadline FROM holdfast.ready
     WHERE queue = $1::bigint AND partition = $2::bigint AND id >= $3::bigint ORDER BY id LIMIT $4::bigint)
    UNION ALL
    (SELECT id, attempts, created_at, expire_at, lease_deadline FROM holdfast.leases
     WHERE queue = $1::bigint AND partition + 0 = $2::bigint AND id + 0 >= $3::bigint ORDER BY id + 0 LIMIT $4::bigint)
    ORDER BY id LIMIT $4::bigint
) AS state CROSS JOIN LATERAL (SELECT * FROM holdfast.items WHERE items.id = state.id OFFSET 0) AS items
ORDER BY state.id

-- name: list_scheduled
SELECT items.id, state.attempts, state.created_at, state.expire_at, 0::bigint, state.enqueue_at,
    items.kind, items.encoding, items.reference, items.payload, items.dedupe_key, items.source_id,
    items.source_queue, items.death_reason, items.death_attempts, items.died_at, items.former_key
FROM holdfast.scheduled AS state CROSS JOIN LATERAL (
    SELECT * FROM holdfast.items WHERE items.id = state.id OFFSET 0) AS items
WHERE state.queue = $1::bigint AND state.partition = $2::bigint AND state.id >= $3::bigint
ORDER BY state.id LIMIT $4::bigint

-- name: lock_keys
-- Requests with dedupe keys or source ids for one queue come one after the other, from whichever server.
SELECT pg_advisory_xact_lock(1212106564, $1::bigint::integer)

-- name: lock_leases
-- Several requests of one batch: their leases are locked in one order, whatever the order of the requests.
SELECT id FROM holdfast.leases WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE

-- name: move_to_dead_queue
-- The whole death in one commit: the row itself becomes the dead letter, with a new id and its story.
-- $1 $2 target, $3 moment or null, $4 its expire timeout, $5 source queue's name, $6 reason, $7 old ids, $8 their texts,
-- $9 attempts. One whose source id is there already (an import) is left where it is, for the caller to delete.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.*
    FROM unnest($7::bigint[], $8::text[], $9::bigint[]) AS given (old_id, source_id, attempts)
), found AS (
    SELECT numbered.*, body.place FROM numbered CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.items WHERE items.id = numbered.old_id OFFSET 0) AS body
    WHERE NOT EXISTS (
        SELECT 1 FROM holdfast.items AS known
        WHERE known.queue = $1::bigint AND known.source_id = numbered.source_id AND known.source_id IS NOT NULL
        OFFSET 0)
), moved AS (
    UPDATE holdfast.items SET id = found.id, first_id = NULL, queue = $1::bigint, partition = $2::bigint,
        former_key = coalesce(items.dedupe_key, items.former_key), dedupe_key = NULL,
        source_id = found.source_id, source_queue = $5::text, death_reason = $6::text,
        death_attempts = found.attempts, died_at = (SELECT now FROM clock)
    FROM found WHERE items.ctid = found.place
    RETURNING found.id, found.old_id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0 FROM moved
)
SELECT old_id FROM moved

-- name: move_to_source_queue
-- The whole redrive in one commit: the row itself goes back, with a new id and no story but its old id.
-- $1 $2 target, $3 moment or null, $4 its expire timeout, $5 old ids, $6 their texts.
-- One whose source id is there already (an import) is left where it is, for the caller to delete.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.*
    FROM unnest($5::bigint[], $6::text[]) AS given (old_id, source_id)
), found AS (
    SELECT numbered.*, body.place FROM numbered CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.items WHERE items.id = numbered.old_id OFFSET 0) AS body
    WHERE NOT EXISTS (
        SELECT 1 FROM holdfast.items AS known
        WHERE known.queue = $1::bigint AND known.source_id = numbered.source_id AND known.source_id IS NOT NULL
        OFFSET 0)
), moved AS (
    UPDATE holdfast.items SET id = found.id, first_id = NULL, queue = $1::bigint, partition = $2::bigint,
        dedupe_key = NULL, source_id = found.source_id, source_queue = NULL, death_reason = NULL, death_attempts = NULL, died_at = NULL
    FROM found WHERE items.ctid = found.place
    RETURNING found.id, found.old_id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0 FROM moved
)
SELECT old_id FROM moved

-- name: notify
-- A hint to other servers; nothing waits for it to reach the disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify('holdfast', payload)
FROM unnest($1::text[]) AS given (payload)

-- name: produce_items
-- Append plain items in the order of the request. $3 moment or null, $4 expire timeout.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), appended AS (
    INSERT INTO holdfast.items (id, queue, partition, kind, encoding, reference, payload)
    SELECT nextval('holdfast.item_ids'), $1::bigint, $2::bigint, kind, encoding, reference, payload
    FROM unnest($5::text[], $6::text[], $7::text[], $8::bytea[]) AS given (kind, encoding, reference, payload)
    RETURNING id
)
INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0
FROM appended
RETURNING id

-- name: produce_keyed_items
-- The general kind: with dedupe keys and schedules. An item whose key is taken is left out of the answer.
-- Numbered in the order of the request, inserted in the order of keys: two servers meet the same key in one order.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, position, kind, encoding, reference, dedupe_key, enqueue_at, payload
    FROM unnest($5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[], $10::bytea[])
        WITH ORDINALITY AS given (kind, encoding, reference, dedupe_key, enqueue_at, payload, position)
), inserted AS (
    INSERT INTO holdfast.items (id, queue, partition, kind, encoding, reference, dedupe_key, payload)
    SELECT id, $1::bigint, $2::bigint, kind, encoding, reference, dedupe_key, payload
    FROM numbered ORDER BY dedupe_key NULLS FIRST, id
    ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL DO NOTHING
    RETURNING id
), placed AS (
    SELECT numbered.id, numbered.position, numbered.enqueue_at,
        numbered.enqueue_at >= (SELECT now + $11::bigint FROM clock) AS is_scheduled
    FROM inserted JOIN numbered ON numbered.id = inserted.id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0
    FROM placed WHERE NOT is_scheduled
), scheduled AS (
    INSERT INTO holdfast.scheduled (id, created_at, expire_at, enqueue_at, queue, partition, attempts)
    SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), enqueue_at, $1::bigint, $2::bigint, 0
    FROM placed WHERE is_scheduled
)
SELECT position, id, is_scheduled FROM placed

-- name: read_counts
SELECT $2::bigint,
    (SELECT count(*) FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.leases WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.scheduled WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint)

-- name: read_moments
-- The queue's nearest deadlines, those of all its partitions: looking once too often costs little. And whether items
-- of this partition are dying, whichever server marked them; a thousand is as good as more.
SELECT
    least((SELECT lease_deadline FROM holdfast.leases WHERE queue = $1::bigint ORDER BY lease_deadline LIMIT 1),
        (SELECT enqueue_at FROM holdfast.scheduled WHERE queue + 0 = $1::bigint ORDER BY enqueue_at LIMIT 1)),
    (SELECT expire_at FROM holdfast.ready WHERE queue + 0 = $1::bigint ORDER BY expire_at LIMIT 1),
    (SELECT items.died_at FROM holdfast.items CROSS JOIN LATERAL (
        SELECT 1 FROM holdfast.ready
        WHERE ready.queue = $1::bigint AND ready.partition = items.partition AND ready.id = items.id OFFSET 0) AS queued
     WHERE items.queue = $1::bigint AND items.died_at IS NOT NULL ORDER BY items.died_at LIMIT 1),
    (SELECT count(*) FROM (
        SELECT 1 FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint LIMIT 1000) AS marked)

-- name: release_leases
-- Undo leases that nobody was told of: same id, same place, the attempt does not count.
WITH held AS (
    SELECT id FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), taken AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (SELECT id FROM held))
    RETURNING id, created_at, expire_at, attempts
)
INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
SELECT id, created_at, expire_at, $1::bigint, $2::bigint, attempts - 1 FROM taken
RETURNING expire_at

-- name: remember_arrivals
-- Every arrival is remembered until its source has removed the item; the answer is what is new.
INSERT INTO holdfast.arrivals (queue, source_id, source_queue)
SELECT $1::bigint, given.source_id, given.source_queue
FROM unnest($2::text[], $3::text[]) AS given (source_id, source_queue)
ON CONFLICT DO NOTHING
RETURNING source_id

-- name: requeue_items
-- To the tail, each with a new id, in the given order: $3 old ids, then created_at, expire_at, attempts.
WITH numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.*
    FROM unnest($3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
        AS given (old_id, created_at, expire_at, attempts)
), found AS (
    SELECT numbered.id, body.place FROM numbered CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.items WHERE items.id = numbered.old_id OFFSET 0) AS body
), renumbered AS (
    UPDATE holdfast.items SET id = found.id, first_id = coalesce(items.first_id, items.id)
    FROM found WHERE items.ctid = found.place
)
INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
SELECT id, created_at, expire_at, $1::bigint, $2::bigint, attempts FROM numbered

-- name: schedule_items
-- To the schedule, each with a new id: $3 old ids, then created_at, expire_at, attempts, enqueue_at.
WITH numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.*
    FROM unnest($3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
        AS given (old_id, created_at, expire_at, attempts, enqueue_at)
), found AS (
    SELECT numbered.id, body.place FROM numbered CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.items WHERE items.id = numbered.old_id OFFSET 0) AS body
), renumbered AS (
    UPDATE holdfast.items SET id = found.id, first_id = coalesce(items.first_id, items.id)
    FROM found WHERE items.ctid = found.place
)
INSERT INTO holdfast.scheduled (id, created_at, expire_at, enqueue_at, queue, partition, attempts)
SELECT id, created_at, expire_at, enqueue_at, $1::bigint, $2::bigint, attempts FROM numbered

-- name: select_arrivals
SELECT source_id FROM holdfast.arrivals WHERE queue + 0 = $1::bigint AND source_queue = $2::text LIMIT $3::bigint

-- name: select_dropped
SELECT generation FROM holdfast.dropped LIMIT 100

-- name: select_dying
SELECT dying.id, dying.reason, dying.attempts, dying.died_at, dying.target_queue, dying.target_generation,
    dying.target_partition, dying.target_storage, dying.target_expire_timeout,
    items.kind, items.encoding, items.reference, items.payload, items.former_key
FROM holdfast.dying CROSS JOIN LATERAL (
    SELECT * FROM holdfast.items WHERE items.id = dying.id OFFSET 0) AS items
WHERE dying.queue = $1::bigint AND dying.partition = $2::bigint
ORDER BY dying.id LIMIT $3::bigint

-- name: select_ledger
SELECT at, action, queue_name, item_id, reason, count, detail FROM holdfast.ledger
WHERE queue = $1::bigint ORDER BY entry OFFSET $2::bigint LIMIT $3::bigint

-- name: select_overdue
-- Queues with a deadline that has passed or with dying items, of whichever server: one look into an index for each queue and kind.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($1::bigint) AS now
)
SELECT name FROM holdfast.queues WHERE
    EXISTS (SELECT 1 FROM holdfast.leases
        WHERE queue = queues.generation AND lease_deadline <= (SELECT now FROM clock) OFFSET 0)
    OR EXISTS (SELECT 1 FROM holdfast.scheduled
        WHERE queue + 0 = queues.generation AND enqueue_at <= (SELECT now FROM clock) OFFSET 0)
    OR EXISTS (SELECT 1 FROM holdfast.dying WHERE queue = queues.generation OFFSET 0)
    OR CASE WHEN EXISTS (SELECT 1 FROM holdfast.queues AS source
        WHERE source.dead_queue = queues.name AND source.dead_queue <> '' OFFSET 0)
    THEN queues.dead_retention_us > 0 AND EXISTS (SELECT 1 FROM holdfast.items
        WHERE queue = queues.generation AND died_at IS NOT NULL
            AND died_at <= (SELECT now FROM clock) - queues.dead_retention_us OFFSET 0)
    ELSE EXISTS (SELECT 1 FROM holdfast.ready
        WHERE queue + 0 = queues.generation AND expire_at <= (SELECT now FROM clock) OFFSET 0)
    END

-- name: take_dying
WITH wanted AS (
    SELECT unnest($3::bigint[]) AS id
), held AS (
    SELECT found.place FROM wanted CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.dying
        WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found
), taken AS (
    DELETE FROM holdfast.dying WHERE ctid = ANY (ARRAY (SELECT place FROM held))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id

-- name: take_expired
-- $3 moment or null, $4 how many.
WITH late AS (
    SELECT ctid AS place FROM holdfast.ready
    WHERE queue + 0 = $1::bigint AND expire_at <= (SELECT holdfast.moment_us($3::bigint)) AND partition + 0 = $2::bigint
    ORDER BY expire_at LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM late))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY expire_at, id

-- name: take_leases
-- All of $3 or none out of their leases, for what becomes of them next.
WITH held AS (
    SELECT id, created_at, expire_at, attempts FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), whole AS (
    SELECT count(*) = $4::bigint AS yes FROM held
), taken AS (
    DELETE FROM holdfast.leases WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
)
SELECT whole.yes, held.id, held.created_at, held.expire_at, held.attempts FROM whole LEFT JOIN held ON true

-- name: take_leases_run_out
-- $3 moment or null, $4 how many. Whoever works on a row at this moment decides about it.
WITH late AS (
    SELECT id FROM holdfast.leases
    WHERE queue = $1::bigint AND lease_deadline <= (SELECT holdfast.moment_us($3::bigint)) AND partition + 0 = $2::bigint
    ORDER BY lease_deadline LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (SELECT id FROM late))
    RETURNING id, created_at, expire_at, attempts, lease_deadline
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY lease_deadline, id

-- name: take_past_retention
-- Queued dead letters that died before $3 moment or null, less $5 retention; $4 how many.
WITH old AS MATERIALIZED (
    SELECT items.id, items.died_at FROM holdfast.items CROSS JOIN LATERAL (
        SELECT ready.id FROM holdfast.ready
        WHERE ready.queue = $1::bigint AND ready.partition = $2::bigint AND ready.id = items.id OFFSET 0) AS queued
    WHERE items.queue = $1::bigint AND items.died_at IS NOT NULL
        AND items.died_at <= (SELECT holdfast.moment_us($3::bigint) - $5::bigint) AND items.partition + 0 = $2::bigint
    ORDER BY items.died_at LIMIT $4::bigint
), picked AS (
    SELECT held.place, old.died_at FROM old CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.ready
        WHERE queue = $1::bigint AND partition = $2::bigint AND id = old.id FOR UPDATE SKIP LOCKED) AS held
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id

-- name: take_redrivable
-- Queued items that died in a queue and may go back there: $3 ids, $4 that queue's name.
WITH wanted AS (
    SELECT unnest($3::bigint[]) AS id
), found AS (
    SELECT ready.place FROM wanted
    CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.ready
        WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS ready
    CROSS JOIN LATERAL (
        SELECT 1 FROM holdfast.items WHERE items.id = wanted.id AND items.source_queue = $4::text OFFSET 0) AS item
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM found))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id

-- name: take_schedules_due
-- $3 moment or null, $4 how many.
WITH due AS (
    SELECT ctid AS place FROM holdfast.scheduled
    WHERE queue + 0 = $1::bigint AND enqueue_at <= (SELECT holdfast.moment_us($3::bigint)) AND partition + 0 = $2::bigint
    ORDER BY enqueue_at LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.scheduled WHERE ctid = ANY (ARRAY (SELECT place FROM due))
    RETURNING id, created_at, expire_at, attempts, enqueue_at
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY enqueue_at, id

-- name: take_used_up
-- Queued items that may not be leased again: $3 attempts limit, $4 how many.
WITH used_up AS (
    SELECT ctid AS place FROM holdfast.ready
    WHERE queue + 0 = $1::bigint AND attempts > 0 AND attempts >= $3::bigint AND partition + 0 = $2::bigint
    LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM used_up))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id

-- name: tally
-- One snapshot: $3 moment or null, $4 attempts ceiling.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), queued AS (
    SELECT count(*) AS count, coalesce(sum((SELECT now FROM clock) - created_at), 0) AS age,
        count(*) FILTER (WHERE expire_at <= (SELECT now FROM clock) OR attempts >= $4::bigint) AS overdue
    FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint
), leased AS (
    SELECT count(*) AS count, coalesce(sum((SELECT now FROM clock) - created_at), 0) AS age,
        coalesce(sum((SELECT now FROM clock) - leased_at), 0) AS leased_age
    FROM holdfast.leases WHERE queue = $1::bigint AND partition = $2::bigint
)
SELECT queued.count, leased.count,
    (SELECT count(*) FROM holdfast.scheduled WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint),
    queued.overdue,
    greatest(0, coalesce((queued.age + leased.age) / nullif(queued.count + leased.count, 0), 0))::bigint,
    greatest(0, coalesce(leased.leased_age / nullif(leased.count, 0), 0))::bigint
FROM queued, leased
