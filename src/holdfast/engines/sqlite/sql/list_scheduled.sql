SELECT i.id, s.attempts, s.created_at, s.expire_at, 0, s.enqueue_at, i.kind, i.encoding, i.reference,
    i.payload, i.dedupe_key, i.source_id, i.source_queue, i.death_reason, i.death_attempts, i.died_at, i.former_key
FROM scheduled s JOIN items i ON i.id = s.id
WHERE s.id BETWEEN ?1 AND ?2 ORDER BY s.id LIMIT ?3
