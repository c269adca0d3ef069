INSERT INTO loose_blobs (blob, due_at) VALUES (:blob, :due_at)
