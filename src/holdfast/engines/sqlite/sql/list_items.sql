SELECT i.id, s.attempts, s.created_at, s.expire_at, s.lease_deadline, 0, i.kind, i.encoding, i.reference,
    i.payload, i.dedupe_key, i.source_id, i.source_queue, i.death_reason, i.death_attempts, i.died_at, i.former_key
FROM (
    SELECT * FROM (SELECT id, attempts, created_at, expire_at, 0 AS lease_deadline
                   FROM ready WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3)
    UNION ALL
    SELECT * FROM (SELECT id, attempts, created_at, expire_at, lease_deadline
                   FROM leases WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3)
) s JOIN items i ON i.id = s.id
ORDER BY i.id LIMIT ?3
