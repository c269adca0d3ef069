INSERT INTO series (transaction_id, series, count, series_count) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT DO UPDATE SET count = ?3, series_count = coalesce(?4, series_count)
