SELECT id FROM letters WHERE queue = :queue AND digest = :digest AND acked = 0 ORDER BY id LIMIT 1
