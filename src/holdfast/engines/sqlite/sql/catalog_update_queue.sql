UPDATE queues SET dead_queue = ?2, record = ?3 WHERE generation = ?1
