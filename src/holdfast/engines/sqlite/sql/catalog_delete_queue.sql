DELETE FROM queues WHERE generation = ?
