-- $3 moment or null, $4 how many, $5 from which id on, $6 lease timeout, $7 whether expiry counts,
-- $8 attempts ceiling, $9 what every moment is after.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), picked AS (
    SELECT id, created_at, expire_at, attempts, ctid AS place FROM holdfast.ready
    WHERE queue = $1::bigint AND partition = $2::bigint AND id >= $5::bigint
        AND expire_at + 0 > (SELECT CASE WHEN $7::bigint = 1 THEN now ELSE $9::bigint END FROM clock) AND attempts + 0 < $8::bigint
    ORDER BY id LIMIT $4::bigint
    FOR UPDATE SKIP LOCKED
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked))
), leased AS (
    INSERT INTO holdfast.leases (id, created_at, expire_at, leased_at, lease_deadline, queue, partition, attempts)
    SELECT id, created_at, expire_at, (SELECT now FROM clock), (SELECT now + $6::bigint FROM clock),
        $1::bigint, $2::bigint, attempts + 1
    FROM picked
)
SELECT picked.id, picked.attempts + 1, body.payload, body.encoding, body.kind, body.reference
FROM picked CROSS JOIN LATERAL (
    SELECT payload, encoding, kind, reference FROM holdfast.items WHERE items.id = picked.id OFFSET 0) AS body
ORDER BY picked.id
