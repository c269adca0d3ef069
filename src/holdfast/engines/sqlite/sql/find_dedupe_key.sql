SELECT id FROM items WHERE dedupe_key = ?
