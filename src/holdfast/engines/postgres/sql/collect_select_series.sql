SELECT series, count, series_count, stored_count, stored_bytes FROM holdfast.collect_series
WHERE transaction_id = $1::text ORDER BY series
