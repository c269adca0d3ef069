SELECT generation, record FROM queues WHERE name = ?
