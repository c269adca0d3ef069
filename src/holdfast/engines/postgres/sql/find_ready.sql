SELECT queued.id FROM unnest($3::bigint[]) AS wanted (id) CROSS JOIN LATERAL (
    SELECT id FROM holdfast.ready
    WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id OFFSET 0) AS queued
