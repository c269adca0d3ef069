SELECT number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac
FROM ledger ORDER BY number DESC LIMIT 1
