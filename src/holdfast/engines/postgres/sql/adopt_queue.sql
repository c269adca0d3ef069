-- A queue whose catalog is in another storage: its generation is held here from its first use until it is dropped.
INSERT INTO holdfast.queues (generation, name, dead_queue, dead_retention_us, record)
SELECT $1::bigint, $2::text, '', 0, ''
WHERE NOT EXISTS (SELECT 1 FROM holdfast.dropped WHERE generation = $1::bigint)
ON CONFLICT (generation) DO NOTHING
