UPDATE holdfast.collect_transactions SET is_clean = true, owner = '', fence = fence + 1, updated_at = holdfast.collect_now_us(), request = ''
WHERE id = $1::text AND fence = $2::bigint RETURNING id
