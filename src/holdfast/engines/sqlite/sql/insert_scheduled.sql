INSERT INTO scheduled (id, created_at, expire_at, attempts, enqueue_at) VALUES (?, ?, ?, ?, ?)
