SELECT items.dedupe_key, items.id, items.partition
FROM unnest($2::text[]) AS wanted (dedupe_key) CROSS JOIN LATERAL (
    SELECT dedupe_key, id, partition FROM holdfast.items
    WHERE queue = $1::bigint AND items.dedupe_key = wanted.dedupe_key AND items.dedupe_key IS NOT NULL OFFSET 0) AS items
