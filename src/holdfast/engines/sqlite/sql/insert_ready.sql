INSERT INTO ready (id, created_at, expire_at, attempts) VALUES (?, ?, ?, ?)
