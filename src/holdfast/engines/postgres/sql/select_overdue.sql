-- Queues with a deadline that has passed or with dying items, of whichever server: one look into an index for each queue and kind.
WITH clock AS MATERIALIZED (
    SELECT holdfast.moment_us($1::bigint) AS now
)
SELECT name FROM holdfast.queues WHERE
    EXISTS (SELECT 1 FROM holdfast.leases
        WHERE queue = queues.generation AND lease_deadline <= (SELECT now FROM clock) OFFSET 0)
    OR EXISTS (SELECT 1 FROM holdfast.scheduled
        WHERE queue + 0 = queues.generation AND enqueue_at <= (SELECT now FROM clock) OFFSET 0)
    OR EXISTS (SELECT 1 FROM holdfast.dying WHERE queue = queues.generation OFFSET 0)
    OR CASE WHEN EXISTS (SELECT 1 FROM holdfast.queues AS source
        WHERE source.dead_queue = queues.name AND source.dead_queue <> '' OFFSET 0)
    THEN queues.dead_retention_us > 0 AND EXISTS (SELECT 1 FROM holdfast.items
        WHERE queue = queues.generation AND died_at IS NOT NULL
            AND died_at <= (SELECT now FROM clock) - queues.dead_retention_us OFFSET 0)
    ELSE EXISTS (SELECT 1 FROM holdfast.ready
        WHERE queue + 0 = queues.generation AND expire_at <= (SELECT now FROM clock) OFFSET 0)
    END
