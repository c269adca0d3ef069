SELECT at, action, queue_name, item_id, reason, count, detail FROM ledger WHERE entry > ?1 ORDER BY entry LIMIT ?2
