INSERT INTO ready (id, created_at, expire_at, attempts)
SELECT id, created_at, expire_at, attempts - 1 FROM leases WHERE id = ?
