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
