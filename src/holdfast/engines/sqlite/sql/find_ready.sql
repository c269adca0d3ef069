SELECT 1 FROM ready WHERE id = ?
