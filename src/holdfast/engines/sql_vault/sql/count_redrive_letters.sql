SELECT status, count(*) FROM redrive_letters WHERE redrive = :redrive GROUP BY status
