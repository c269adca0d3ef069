WITH picked AS (
    SELECT id FROM holdfast.leases WHERE queue = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY lease_deadline LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (SELECT id FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone
