DELETE FROM holdfast.collect_series
WHERE transaction_id = $1::text AND series = ANY ($2::text[]) AND count IS NULL AND stored_count = 0
