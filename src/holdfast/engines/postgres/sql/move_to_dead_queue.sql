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
    UPDATE holdfast.items SET id = found.id, queue = $1::bigint, partition = $2::bigint,
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
