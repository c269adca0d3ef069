UPDATE holdfast.items SET former_key = coalesce(dedupe_key, former_key), dedupe_key = NULL, source_id = NULL
WHERE id = ANY ($1::bigint[]) AND coalesce(dedupe_key, source_id) IS NOT NULL
