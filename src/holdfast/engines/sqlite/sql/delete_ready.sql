DELETE FROM ready WHERE id = ?
