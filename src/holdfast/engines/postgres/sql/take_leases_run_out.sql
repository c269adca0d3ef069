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
