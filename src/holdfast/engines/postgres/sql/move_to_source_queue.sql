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
    UPDATE holdfast.items SET id = found.id, queue = $1::bigint, partition = $2::bigint, dedupe_key = NULL,
        source_id = found.source_id, source_queue = NULL, death_reason = NULL, death_attempts = NULL, died_at = NULL
    FROM found WHERE items.ctid = found.place
    RETURNING found.id, found.old_id
), queued AS (
    INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
    SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0 FROM moved
)
SELECT old_id FROM moved
