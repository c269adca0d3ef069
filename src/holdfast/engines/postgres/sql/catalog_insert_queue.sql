INSERT INTO holdfast.queues (generation, name, dead_queue, dead_retention_us, record)
VALUES (nextval('holdfast.generations'), $1::text, $2::text, $3::bigint, $4::text)
RETURNING generation
