SELECT at, transaction_id, action, reason, detail FROM ledger ORDER BY number LIMIT ?2 OFFSET ?1
