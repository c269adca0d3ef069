SELECT number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac
FROM ledger WHERE first_letter > 0 AND first_letter <= :letter AND last_letter >= :letter ORDER BY number LIMIT :count_max
