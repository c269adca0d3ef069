SELECT at, transaction_id, action, reason, detail FROM holdfast.collect_ledger
ORDER BY number LIMIT $2::bigint OFFSET $1::bigint
