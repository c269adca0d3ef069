SELECT id, created_at, expire_at, attempts FROM ready
WHERE attempts > 0 AND attempts >= ?1 AND id BETWEEN ?2 AND ?3
LIMIT ?4
