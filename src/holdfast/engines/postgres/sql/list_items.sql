-- Queued and leased items by id: $3 from which on, $4 how many.
SELECT items.id, state.attempts, state.created_at, state.expire_at, state.lease_deadline, 0::bigint,
    items.kind, items.encoding, items.reference, items.payload, items.dedupe_key, items.source_id,
    items.source_queue, items.death_reason, items.death_attempts, items.died_at, items.former_key
FROM (
    (SELECT id, attempts, created_at, expire_at, 0::bigint AS lease_deadline FROM holdfast.ready
     WHERE queue = $1::bigint AND partition = $2::bigint AND id >= $3::bigint ORDER BY id LIMIT $4::bigint)
    UNION ALL
    (SELECT id, attempts, created_at, expire_at, lease_deadline FROM holdfast.leases
     WHERE queue = $1::bigint AND partition + 0 = $2::bigint AND id + 0 >= $3::bigint ORDER BY id + 0 LIMIT $4::bigint)
    ORDER BY id LIMIT $4::bigint
) AS state CROSS JOIN LATERAL (SELECT * FROM holdfast.items WHERE items.id = state.id OFFSET 0) AS items
ORDER BY state.id
