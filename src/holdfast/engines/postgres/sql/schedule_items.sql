-- To the schedule, each with a new id: $3 old ids, then created_at, expire_at, attempts, enqueue_at.
WITH numbered AS MATERIALIZED (
    SELECT nextval('holdfast.item_ids') AS id, given.*
    FROM unnest($3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
        AS given (old_id, created_at, expire_at, attempts, enqueue_at)
), found AS (
    SELECT numbered.id, body.place FROM numbered CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.items WHERE items.id = numbered.old_id OFFSET 0) AS body
), renumbered AS (
    UPDATE holdfast.items SET id = found.id FROM found WHERE items.ctid = found.place
)
INSERT INTO holdfast.scheduled (id, created_at, expire_at, enqueue_at, queue, partition, attempts)
SELECT id, created_at, expire_at, enqueue_at, $1::bigint, $2::bigint, attempts FROM numbered
