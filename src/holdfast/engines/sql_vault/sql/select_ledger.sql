SELECT number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac
FROM ledger WHERE number > :after ORDER BY number LIMIT :count_max
