UPDATE transactions SET owner = '', fence = fence + 1, lease_deadline = 0 WHERE id = ?1 AND fence = ?2
