WITH wanted AS (
    SELECT unnest($3::bigint[]) AS id
), held AS (
    SELECT found.place FROM wanted CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.dying
        WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id FOR UPDATE) AS found
), taken AS (
    DELETE FROM holdfast.dying WHERE ctid = ANY (ARRAY (SELECT place FROM held))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id
