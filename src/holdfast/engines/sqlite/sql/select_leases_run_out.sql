SELECT id, created_at, expire_at, attempts FROM leases
WHERE lease_deadline <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY lease_deadline, id LIMIT ?4
