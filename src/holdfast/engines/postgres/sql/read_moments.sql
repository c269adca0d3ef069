-- The queue's nearest deadlines, those of all its partitions: looking once too often costs little. And whether items
-- of this partition are dying, whichever server marked them; a thousand is as good as more.
SELECT
    least((SELECT lease_deadline FROM holdfast.leases WHERE queue = $1::bigint ORDER BY lease_deadline LIMIT 1),
        (SELECT enqueue_at FROM holdfast.scheduled WHERE queue + 0 = $1::bigint ORDER BY enqueue_at LIMIT 1)),
    (SELECT expire_at FROM holdfast.ready WHERE queue + 0 = $1::bigint ORDER BY expire_at LIMIT 1),
    (SELECT items.died_at FROM holdfast.items CROSS JOIN LATERAL (
        SELECT 1 FROM holdfast.ready
        WHERE ready.queue = $1::bigint AND ready.partition = items.partition AND ready.id = items.id OFFSET 0) AS queued
     WHERE items.queue = $1::bigint AND items.died_at IS NOT NULL ORDER BY items.died_at LIMIT 1),
    (SELECT count(*) FROM (
        SELECT 1 FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint LIMIT 1000) AS marked)
