UPDATE holdfast.collect_transactions SET state = $4::text, reason = $5::text,
    updated_at = holdfast.collect_now_us(), progress_at = holdfast.collect_now_us()
WHERE id = $1::text AND fence = $2::bigint AND state = $3::text
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
