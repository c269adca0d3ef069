DELETE FROM arrivals WHERE source_id = ?
