SELECT 1 FROM items WHERE source_id = ?
