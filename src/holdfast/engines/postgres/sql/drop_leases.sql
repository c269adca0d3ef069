-- A bounded number of what is left of a deleted queue; nobody can reach it any more.
WITH picked AS (
    SELECT ctid AS place FROM holdfast.leases WHERE queue = $1::bigint LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.leases WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone
