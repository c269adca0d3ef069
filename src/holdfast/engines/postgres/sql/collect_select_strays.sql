SELECT path FROM holdfast.collect_strays WHERE transaction_id = $1::text
