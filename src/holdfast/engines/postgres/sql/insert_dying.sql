-- The first commit of a death: $3 moment or null, $4 ids, then created_at, expire_at, attempts; $8 reason; $9 the target.
INSERT INTO holdfast.dying (id, created_at, expire_at, attempts, died_at, queue, partition, reason,
    target_queue, target_storage, target_generation, target_partition, target_expire_timeout)
SELECT given.id, given.created_at, given.expire_at, given.attempts, holdfast.moment_us($3::bigint),
    $1::bigint, $2::bigint, $8::text, $9::text, $10::text, $11::bigint, $12::bigint, $13::bigint
FROM unnest($4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]) AS given (id, created_at, expire_at, attempts)
