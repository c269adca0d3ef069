-- $1 owner, $2 lease, $3 how many. Rows that another collector is just taking are left to it.
UPDATE holdfast.collect_transactions SET owner = $1::text, fence = fence + 1, lease_deadline = holdfast.collect_now_us() + $2::bigint
WHERE id = ANY (ARRAY (
    SELECT id FROM holdfast.collect_transactions
    WHERE NOT is_clean AND owner <> $1::text AND lease_deadline < holdfast.collect_now_us()
    ORDER BY id LIMIT $3::bigint FOR UPDATE SKIP LOCKED
))
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
