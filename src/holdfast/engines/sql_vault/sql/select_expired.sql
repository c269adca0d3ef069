SELECT id FROM letters WHERE state = :state AND changed_at < :before ORDER BY id LIMIT :count_max
