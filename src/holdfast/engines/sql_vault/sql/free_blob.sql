INSERT INTO loose_blobs (blob, due_at)
SELECT :blob, :due_at WHERE NOT EXISTS (SELECT 1 FROM contents WHERE blob = :blob)
ON CONFLICT (blob) DO NOTHING
