-- Every arrival is remembered until its source has removed the item; the answer is what is new.
INSERT INTO holdfast.arrivals (queue, source_id, source_queue)
SELECT $1::bigint, given.source_id, given.source_queue
FROM unnest($2::text[], $3::text[]) AS given (source_id, source_queue)
ON CONFLICT DO NOTHING
RETURNING source_id
