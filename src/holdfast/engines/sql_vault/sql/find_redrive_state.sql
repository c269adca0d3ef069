SELECT state FROM redrives WHERE id = :redrive
