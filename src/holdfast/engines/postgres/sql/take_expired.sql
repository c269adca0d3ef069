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
