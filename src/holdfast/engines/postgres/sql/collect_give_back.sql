UPDATE holdfast.collect_transactions SET owner = '', fence = fence + 1, lease_deadline = 0
WHERE id = $1::text AND fence = $2::bigint
