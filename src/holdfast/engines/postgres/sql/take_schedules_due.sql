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
