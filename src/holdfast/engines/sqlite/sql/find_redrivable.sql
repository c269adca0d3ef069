SELECT r.created_at, r.expire_at, r.attempts FROM ready r JOIN items i ON i.id = r.id
WHERE r.id = ?1 AND i.source_queue = ?2
