-- Items with their story. One whose dedupe key or source id is here already is left out of the answer.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.* FROM unnest(
        $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::bigint[],
        $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[], $17::bigint[], $18::bytea[], $20::text[]
    ) WITH ORDINALITY AS given (
        kind, encoding, reference, dedupe_key, source_id, source_queue, death_reason, death_attempts,
        died_at, created_at, expire_at, enqueue_at, attempts, payload, former_key, position)
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
        numbered.enqueue_at >= (SELECT now + $19::bigint FROM clock) AS is_scheduled
    FROM inserted JOIN numbered ON numbered.id = inserted.id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, created_at, expire_at, $1::bigint, $2::bigint, attempts FROM placed WHERE NOT is_scheduled
), scheduled AS (
    INSERT INTO holdfast.scheduled (id, created_at, expire_at, enqueue_at, queue, partition, attempts)
    SELECT id, created_at, expire_at, enqueue_at, $1::bigint, $2::bigint, attempts FROM placed WHERE is_scheduled
)
SELECT position, id, is_scheduled, created_at, expire_at FROM placed ORDER BY position
