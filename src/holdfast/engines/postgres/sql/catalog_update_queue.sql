UPDATE holdfast.queues SET dead_queue = $2::text, dead_retention_us = $3::bigint, record = $4::text
WHERE generation = $1::bigint
