SELECT items.id, state.attempts, state.created_at, state.expire_at, 0::bigint, state.enqueue_at,
    items.kind, items.encoding, items.reference, items.payload, items.dedupe_key, items.source_id,
    items.source_queue, items.death_reason, items.death_attempts, items.died_at, items.former_key
FROM holdfast.scheduled AS state CROSS JOIN LATERAL (
    SELECT * FROM holdfast.items WHERE items.id = state.id OFFSET 0) AS items
WHERE state.queue = $1::bigint AND state.partition = $2::bigint AND state.id >= $3::bigint
ORDER BY state.id LIMIT $4::bigint
