SELECT at, action, queue_name, item_id, reason, count, detail FROM holdfast.ledger
WHERE queue = $1::bigint ORDER BY entry OFFSET $2::bigint LIMIT $3::bigint
