UPDATE redrive_letters
SET repeated = CASE
        WHEN status = 'waiting' AND NOT EXISTS (
            SELECT 1 FROM redrive_letters other
            WHERE other.letter = redrive_letters.letter AND other.status = 'released')
        THEN repeated ELSE 1 END,
    status = 'leased', lease_until = :until
WHERE redrive = :redrive AND letter IN_IDS
