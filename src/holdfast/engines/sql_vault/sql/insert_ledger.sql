INSERT INTO ledger (number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason,
    detail, mac, first_letter, last_letter)
VALUES (:number, :at, :actor, :action, :origin, :outcome, :queue, :from_state, :to_state, :count, :letters, :reason,
    :detail, :mac, :first_letter, :last_letter)
