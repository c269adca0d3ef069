UPDATE redrives SET state = :state, why = :why WHERE id = :redrive
