-- All of $3 or none out of their leases, for what becomes of them next.
WITH held AS (
    SELECT id, created_at, expire_at, attempts FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), whole AS (
    SELECT count(*) = $4::bigint AS yes FROM held
), taken AS (
    DELETE FROM holdfast.leases WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
)
SELECT whole.yes, held.id, held.created_at, held.expire_at, held.attempts FROM whole LEFT JOIN held ON true
