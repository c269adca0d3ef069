INSERT INTO ledger (at, action, item_id, reason, count, detail) VALUES (?, ?, ?, ?, ?, ?)
