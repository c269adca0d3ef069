SELECT dying.id, dying.reason, dying.attempts, dying.died_at, dying.target_queue, dying.target_generation,
    dying.target_partition, dying.target_storage, dying.target_expire_timeout,
    items.kind, items.encoding, items.reference, items.payload, items.former_key
FROM holdfast.dying CROSS JOIN LATERAL (
    SELECT * FROM holdfast.items WHERE items.id = dying.id OFFSET 0) AS items
WHERE dying.queue = $1::bigint AND dying.partition = $2::bigint
ORDER BY dying.id LIMIT $3::bigint
