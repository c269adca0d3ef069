-- Queues with a deadline that has passed, of whichever server: one look into an index for each queue and kind.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($1::bigint) AS now
)
SELECT name FROM holdfast.queues WHERE
    EXISTS (SELECT 1 FROM holdfast.leases
        WHERE queue = queues.generation AND lease_deadline <= (SELECT now FROM clock) LIMIT 1)
    OR EXISTS (SELECT 1 FROM holdfast.scheduled
        WHERE queue = queues.generation AND enqueue_at <= (SELECT now FROM clock) LIMIT 1)
    OR (NOT EXISTS (SELECT 1 FROM holdfast.queues AS source
            WHERE source.dead_queue = queues.name AND source.dead_queue <> '')
        AND EXISTS (SELECT 1 FROM holdfast.ready
            WHERE queue = queues.generation AND expire_at <= (SELECT now FROM clock) LIMIT 1))
    OR (queues.dead_retention_us > 0 AND EXISTS (SELECT 1 FROM holdfast.items
        WHERE queue = queues.generation AND died_at IS NOT NULL
            AND died_at <= (SELECT now FROM clock) - queues.dead_retention_us LIMIT 1))
