SELECT count(*) FROM redrive_letters WHERE redrive = :redrive AND repeated = 1
