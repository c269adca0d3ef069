SELECT r.status, l.state, count(*) FROM redrive_letters r LEFT JOIN letters l ON l.id = r.letter
WHERE r.redrive = :redrive GROUP BY r.status, l.state
