INSERT INTO ledger (at, transaction_id, action, reason, detail) VALUES (?1, ?2, ?3, ?4, ?5)
