SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM holdfast.collect_transactions WHERE id > $1::text ORDER BY id LIMIT $2::bigint
