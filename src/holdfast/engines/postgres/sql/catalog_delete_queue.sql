WITH gone AS (
    DELETE FROM holdfast.queues WHERE generation = $1::bigint RETURNING generation
)
INSERT INTO holdfast.dropped (generation) SELECT generation FROM gone ON CONFLICT DO NOTHING
