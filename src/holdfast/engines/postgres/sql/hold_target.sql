-- Whether the dead queue is still there; if so, it cannot be deleted before this transaction ends.
SELECT 1 FROM holdfast.queues WHERE generation = $1::bigint FOR KEY SHARE
