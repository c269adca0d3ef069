UPDATE redrive_letters SET status = 'leased', lease_until = :until WHERE redrive = :redrive AND letter IN_IDS
