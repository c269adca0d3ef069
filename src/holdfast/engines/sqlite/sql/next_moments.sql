SELECT
    (SELECT min(lease_deadline) FROM leases),
    (SELECT min(enqueue_at) FROM scheduled),
    (SELECT min(expire_at) FROM ready),
    (SELECT i.died_at FROM items i
     WHERE i.died_at IS NOT NULL AND EXISTS (SELECT 1 FROM ready r WHERE r.id = i.id) ORDER BY i.died_at LIMIT 1)
