-- Waits for the writers of the queue; none can begin before this transaction ends.
SELECT 1 FROM holdfast.queues WHERE generation = $1::bigint FOR UPDATE
