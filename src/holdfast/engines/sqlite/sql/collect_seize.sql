UPDATE transactions SET owner = ?2, fence = fence + 1, lease_deadline = ?3 WHERE id = ?1
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
