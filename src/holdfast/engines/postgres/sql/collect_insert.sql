INSERT INTO holdfast.collect_transactions
    (id, state, producer, notify, series, created_at, updated_at, progress_at, owner, lease_deadline, request)
SELECT $1::text, $2::text, $3::text, $4::text, $5::text, now, now, now, $6::text, now + $7::bigint, $8::bytea
FROM holdfast.collect_now_us() AS now
ON CONFLICT (id) DO NOTHING
