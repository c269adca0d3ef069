SELECT number, mac FROM ledger ORDER BY number DESC LIMIT 1
