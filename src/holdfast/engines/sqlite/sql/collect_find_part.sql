SELECT series, ordinal, path, size_bytes, sha256 FROM parts
WHERE transaction_id = ?1 AND series = ?2 AND ordinal = ?3
