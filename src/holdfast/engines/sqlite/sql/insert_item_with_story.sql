INSERT INTO items
    (id, kind, encoding, reference, dedupe_key, source_id, source_queue, death_reason, death_attempts, died_at, former_key,
     payload)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
