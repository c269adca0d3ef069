UPDATE holdfast.collect_transactions SET progress_at = holdfast.collect_now_us()
WHERE id = $1::text AND fence = $2::bigint RETURNING id
