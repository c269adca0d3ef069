UPDATE holdfast.collect_series SET count = NULL, series_count = NULL WHERE transaction_id = $1::text AND series = $2::text
