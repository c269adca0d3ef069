SELECT id FROM redrives WHERE operation = :operation
