UPDATE redrive_letters SET status = :status, why = :why, lease_until = :until
WHERE redrive = :redrive AND letter = :letter AND status NOT IN ('redriven', 'failed', 'skipped')
