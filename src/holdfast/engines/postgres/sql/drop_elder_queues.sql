-- The same name under another generation was deleted in its catalog before it could be dropped here.
WITH gone AS (
    DELETE FROM holdfast.queues WHERE name = $2::text AND generation <> $1::bigint AND record = '' RETURNING generation
)
INSERT INTO holdfast.dropped (generation) SELECT generation FROM gone ON CONFLICT DO NOTHING
