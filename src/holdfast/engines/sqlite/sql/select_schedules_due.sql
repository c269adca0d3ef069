SELECT id, created_at, expire_at, attempts FROM scheduled
WHERE enqueue_at <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY enqueue_at, id LIMIT ?4
