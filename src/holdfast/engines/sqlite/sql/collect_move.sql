UPDATE transactions SET state = ?4, reason = ?5, updated_at = ?6, progress_at = ?6
WHERE id = ?1 AND fence = ?2 AND state = ?3
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
