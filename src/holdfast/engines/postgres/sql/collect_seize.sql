UPDATE holdfast.collect_transactions
SET owner = $2::text, fence = fence + 1, lease_deadline = holdfast.collect_now_us() + $3::bigint WHERE id = $1::text
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
