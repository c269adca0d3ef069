SELECT id FROM letters WHERE state = 'redriven' AND changed_at < :before ORDER BY changed_at LIMIT :count_max
