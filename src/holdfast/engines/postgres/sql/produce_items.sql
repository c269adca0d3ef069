-- Append plain items in the order of the request. $3 moment or null, $4 expire timeout.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), appended AS (
    INSERT INTO holdfast.items (id, queue, partition, kind, encoding, reference, payload)
    SELECT nextval('holdfast.item_ids'), $1::bigint, $2::bigint, kind, encoding, reference, payload
    FROM unnest($5::text[], $6::text[], $7::text[], $8::bytea[]) AS given (kind, encoding, reference, payload)
    RETURNING id
)
INSERT INTO holdfast.ready (id, created_at, expire_at, queue, partition, attempts)
SELECT id, (SELECT now FROM clock), (SELECT now + $4::bigint FROM clock), $1::bigint, $2::bigint, 0
FROM appended
RETURNING id
