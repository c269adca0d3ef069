SELECT r.letter, r.redrive_id, r.address, r.status, l.state, l.body_bytes
FROM redrive_letters r LEFT JOIN letters l ON l.id = r.letter
WHERE r.redrive = :redrive AND (r.status = 'waiting' OR (r.status IN ('leased', 'unknown') AND r.lease_until <= :now))
ORDER BY r.letter LIMIT :count_max
