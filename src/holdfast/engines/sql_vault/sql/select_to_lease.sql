SELECT r.letter, r.redrive_id, r.address, r.status, l.state, l.body_bytes, l.queue, l.origin, l.revision
FROM (
    SELECT * FROM (
        SELECT letter, redrive_id, address, status FROM redrive_letters
        WHERE redrive = :redrive AND status = 'waiting' ORDER BY letter LIMIT :count_max) fresh
    UNION ALL
    SELECT * FROM (
        SELECT letter, redrive_id, address, status FROM redrive_letters
        WHERE redrive = :redrive AND status IN ('leased', 'unknown') AND lease_until <= :now
        ORDER BY letter LIMIT :count_max) again
) r LEFT JOIN letters l ON l.id = r.letter
ORDER BY r.letter LIMIT :count_max
