-- At most $3: an estimate that went wrong is put right without counting a million rows.
SELECT count(*) FROM (
    SELECT 1 FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint LIMIT $3::bigint) AS found
