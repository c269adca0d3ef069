UPDATE holdfast.collect_transactions SET lease_deadline = holdfast.collect_now_us() + $3::bigint
FROM unnest($1::text[], $2::bigint[]) AS given (id, fence)
WHERE collect_transactions.id = given.id AND collect_transactions.fence = given.fence
RETURNING collect_transactions.id
