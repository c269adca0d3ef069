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
