SELECT d.id, d.reason, d.attempts, d.died_at,
    d.target_queue, d.target_generation, d.target_partition, d.target_storage, d.target_expire_timeout,
    i.kind, i.encoding, i.reference, i.payload, i.former_key
FROM dying d JOIN items i ON i.id = d.id
WHERE d.id BETWEEN ?1 AND ?2 ORDER BY d.id LIMIT ?3
