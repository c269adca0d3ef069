UPDATE redrive_letters SET status = :status, why = :why, lease_until = 0 WHERE redrive = :redrive AND letter IN_IDS
