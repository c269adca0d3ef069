SELECT request FROM holdfast.collect_transactions WHERE id = $1::text
