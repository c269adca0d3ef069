UPDATE items SET former_key = coalesce(dedupe_key, former_key), dedupe_key = NULL, source_id = NULL
WHERE id = ? AND (dedupe_key IS NOT NULL OR source_id IS NOT NULL)
