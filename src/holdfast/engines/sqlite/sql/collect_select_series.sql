SELECT series, count, series_count, stored_count, stored_bytes FROM series
WHERE transaction_id = ?1 ORDER BY series
