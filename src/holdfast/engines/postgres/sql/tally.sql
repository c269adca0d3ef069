-- One snapshot: $3 moment or null, $4 attempts ceiling.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($3::bigint) AS now
), queued AS (
    SELECT count(*) AS count, coalesce(sum((SELECT now FROM clock) - created_at), 0) AS age,
        count(*) FILTER (WHERE expire_at <= (SELECT now FROM clock) OR attempts >= $4::bigint) AS overdue
    FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint
), leased AS (
    SELECT count(*) AS count, coalesce(sum((SELECT now FROM clock) - created_at), 0) AS age,
        coalesce(sum((SELECT now FROM clock) - leased_at), 0) AS leased_age
    FROM holdfast.leases WHERE queue = $1::bigint AND partition = $2::bigint
)
SELECT queued.count, leased.count,
    (SELECT count(*) FROM holdfast.scheduled WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint),
    queued.overdue,
    greatest(0, coalesce((queued.age + leased.age) / nullif(queued.count + leased.count, 0), 0))::bigint,
    greatest(0, coalesce(leased.leased_age / nullif(leased.count, 0), 0))::bigint
FROM queued, leased
