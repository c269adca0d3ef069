UPDATE transactions SET progress_at = ?3 WHERE id = ?1 AND fence = ?2 RETURNING state
