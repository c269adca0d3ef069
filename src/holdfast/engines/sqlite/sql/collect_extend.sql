UPDATE transactions SET lease_deadline = ?3 WHERE id = ?1 AND fence = ?2 RETURNING id
