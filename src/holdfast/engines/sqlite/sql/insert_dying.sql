INSERT INTO dying
    (id, created_at, expire_at, attempts, reason, died_at,
     target_queue, target_generation, target_partition, target_storage, target_expire_timeout)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
