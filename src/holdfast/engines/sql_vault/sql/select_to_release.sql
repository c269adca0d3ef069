SELECT r.letter, l.queue, l.state, r.status, r.redrive
FROM redrives t JOIN redrive_letters r ON r.redrive = t.id LEFT JOIN letters l ON l.id = r.letter
WHERE t.state = 'cancelled' AND r.status IN ('leased', 'unknown') AND r.lease_until <= :now
ORDER BY r.redrive, r.letter LIMIT :count_max
