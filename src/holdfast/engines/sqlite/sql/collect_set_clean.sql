UPDATE transactions SET is_clean = 1, owner = '', fence = fence + 1, updated_at = ?3, request = x''
WHERE id = ?1 AND fence = ?2 RETURNING id
