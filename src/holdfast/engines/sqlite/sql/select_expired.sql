SELECT id, created_at, expire_at, attempts FROM ready
WHERE expire_at <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY expire_at, id LIMIT ?4
