SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM transactions WHERE id > ?1 ORDER BY id LIMIT ?2
