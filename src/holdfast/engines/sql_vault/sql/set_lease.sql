UPDATE redrive_letters
SET repeated = CASE WHEN status = 'waiting' THEN repeated ELSE 1 END, status = 'leased', lease_until = :until
WHERE redrive = :redrive AND letter IN_IDS
