INSERT INTO series (transaction_id, series, stored_count, stored_bytes) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT DO UPDATE SET stored_count = stored_count + ?3, stored_bytes = stored_bytes + ?4
