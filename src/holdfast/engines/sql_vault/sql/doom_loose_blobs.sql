UPDATE loose_blobs SET doomed = 1
WHERE blob IN (SELECT blob FROM loose_blobs WHERE due_at <= :now ORDER BY due_at LIMIT :count_max)
RETURNING blob
