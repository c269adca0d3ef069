UPDATE holdfast.items SET dedupe_key = NULL, source_id = NULL
WHERE id = ANY ($1::bigint[]) AND (dedupe_key IS NOT NULL OR source_id IS NOT NULL)
