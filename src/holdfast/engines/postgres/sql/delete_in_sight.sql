-- By id, queued, leased or scheduled; unknown ids are skipped. The table's first letter tells which count sinks.
WITH wanted AS (
    SELECT unnest($3::bigint[]) AS id
), leased AS (
    DELETE FROM holdfast.leases WHERE id = ANY (ARRAY (
        SELECT id FROM holdfast.leases
        WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
        ORDER BY id FOR UPDATE))
    RETURNING id
), queued AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (
        SELECT found.place FROM wanted CROSS JOIN LATERAL (
            SELECT ctid AS place FROM holdfast.ready
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found))
    RETURNING id
), scheduled AS (
    DELETE FROM holdfast.scheduled WHERE ctid = ANY (ARRAY (
        SELECT found.place FROM wanted CROSS JOIN LATERAL (
            SELECT ctid AS place FROM holdfast.scheduled
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found))
    RETURNING id
), gone AS (
    SELECT 'l' AS place, id FROM leased UNION ALL SELECT 'q', id FROM queued UNION ALL SELECT 's', id FROM scheduled
), removed AS (
    DELETE FROM holdfast.items WHERE id = ANY (ARRAY (SELECT id FROM gone))
)
SELECT place, id FROM gone ORDER BY id
