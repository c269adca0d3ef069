INSERT INTO ledger (at, action, queue_name, item_id, reason, count, detail) VALUES (?, ?, ?, '', ?, ?, '')
