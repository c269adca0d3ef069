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
