DELETE FROM loose_blobs WHERE blob = :blob AND doomed = 0 RETURNING blob
