INSERT INTO leases (id, created_at, expire_at, attempts, leased_at, lease_deadline)
SELECT id, created_at, expire_at, attempts + 1, ?5, ?6
FROM ready WHERE id BETWEEN ?1 AND ?2 AND expire_at > ?3 AND attempts < ?4
