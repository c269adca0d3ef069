-- Undo leases that nobody was told of: same id, same place, the attempt does not count.
WITH held AS (
    SELECT id FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), taken AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (SELECT id FROM held))
    RETURNING id, created_at, expire_at, attempts
)
INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
SELECT id, created_at, expire_at, $1::bigint, $2::bigint, attempts - 1 FROM taken
RETURNING expire_at
