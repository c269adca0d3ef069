UPDATE letters SET acked = 1 WHERE id IN_IDS
