DELETE FROM holdfast.collect_series WHERE transaction_id = $1::text
