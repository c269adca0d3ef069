SELECT r.id, r.attempts + 1, i.payload, i.encoding, i.kind, i.reference
FROM ready r JOIN items i ON i.id = r.id
WHERE r.id BETWEEN ?1 AND ?2 AND r.expire_at > ?3 AND r.attempts < ?4
ORDER BY r.id LIMIT ?5
