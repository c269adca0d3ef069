SELECT source_id FROM arrivals WHERE source_queue = ? LIMIT ?
