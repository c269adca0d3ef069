INSERT INTO redrive_letters (redrive, letter, redrive_id, address, status)
VALUES (:redrive, :letter, :redrive_id, :address, 'waiting')
