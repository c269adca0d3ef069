-- New arrivals only: a repeat is known here, and so is one that was imported under the same source id.
INSERT INTO holdfast.arrivals (queue, source_id, source_queue)
SELECT $1::bigint, given.source_id, given.source_queue
FROM unnest($2::text[], $3::text[]) AS given (source_id, source_queue)
WHERE NOT EXISTS (
    SELECT 1 FROM holdfast.items
    WHERE items.queue = $1::bigint AND items.source_id = given.source_id AND items.source_id IS NOT NULL
    OFFSET 0)
ON CONFLICT DO NOTHING
RETURNING source_id
