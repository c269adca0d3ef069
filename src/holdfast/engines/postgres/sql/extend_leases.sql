-- All of $3 or none: $4 is how many there must be. $5 moment or null, $6 lease timeout.
WITH held AS (
    SELECT id FROM holdfast.leases
    WHERE id = ANY ($3::bigint[]) AND queue + 0 = $1::bigint AND partition + 0 = $2::bigint
    ORDER BY id FOR UPDATE
), whole AS (
    SELECT count(*) = $4::bigint AS yes FROM held
), extended AS (
    UPDATE holdfast.leases SET lease_deadline = (SELECT holdfast.moment_us($5::bigint) + $6::bigint)
    WHERE id = ANY ($3::bigint[]) AND (SELECT yes FROM whole)
)
SELECT yes,
    CASE WHEN NOT yes THEN ARRAY (SELECT id FROM held) END,
    CASE WHEN NOT yes THEN ARRAY (
        SELECT queued.id FROM unnest($3::bigint[]) AS wanted (id) CROSS JOIN LATERAL (
            SELECT id FROM holdfast.ready
            WHERE queue = $1::bigint AND partition = $2::bigint AND id = wanted.id OFFSET 0) AS queued) END
FROM whole
