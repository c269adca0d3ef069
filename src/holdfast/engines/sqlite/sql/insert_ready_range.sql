INSERT INTO ready (id, created_at, expire_at, attempts)
SELECT id, ?3, ?4, 0 FROM items WHERE id BETWEEN ?1 AND ?2
