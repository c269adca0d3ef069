INSERT INTO arrivals (source_id, source_queue) VALUES (?, ?) ON CONFLICT DO NOTHING
