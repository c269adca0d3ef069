INSERT INTO queues (name, dead_queue, record) VALUES (?, ?, ?)
