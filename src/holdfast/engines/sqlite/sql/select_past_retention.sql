SELECT r.id, r.created_at, r.expire_at, r.attempts FROM items i JOIN ready r ON r.id = i.id
WHERE i.died_at IS NOT NULL AND i.died_at <= ?1 AND i.id BETWEEN ?2 AND ?3
ORDER BY i.died_at LIMIT ?4
