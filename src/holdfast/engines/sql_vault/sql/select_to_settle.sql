SELECT r.letter, l.queue, l.state, r.status, r.lease_until
FROM redrive_letters r LEFT JOIN letters l ON l.id = r.letter
WHERE r.redrive = :redrive AND r.letter IN_IDS ORDER BY r.letter
