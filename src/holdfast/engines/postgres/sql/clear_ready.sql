WITH picked AS (
    SELECT ctid AS place FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint
    ORDER BY id LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked)) RETURNING id
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT count(*) FROM gone
