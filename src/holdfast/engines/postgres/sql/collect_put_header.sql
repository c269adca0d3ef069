INSERT INTO holdfast.collect_series AS known (transaction_id, series, count, series_count)
VALUES ($1::text, $2::text, $3::bigint, $4::bigint)
ON CONFLICT (transaction_id, series) DO UPDATE
SET count = excluded.count, series_count = coalesce(excluded.series_count, known.series_count)
