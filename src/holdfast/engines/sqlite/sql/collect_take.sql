UPDATE transactions SET owner = ?1, fence = fence + 1, lease_deadline = ?2
WHERE id IN (SELECT id FROM transactions WHERE is_clean = 0 AND owner <> ?1 ORDER BY id LIMIT ?3)
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
