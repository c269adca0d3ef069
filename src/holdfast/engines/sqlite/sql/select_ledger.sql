SELECT at, action, item_id, reason, count, detail FROM ledger WHERE entry > ?1 ORDER BY entry LIMIT ?2
