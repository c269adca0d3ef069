UPDATE holdfast.items SET dedupe_key = NULL, source_id = NULL
WHERE id = ANY ($1::bigint[]) AND coalesce(dedupe_key, source_id) IS NOT NULL
