INSERT INTO parts (transaction_id, series, ordinal, path, size_bytes, sha256)
VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING
