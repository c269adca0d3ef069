DELETE FROM scheduled WHERE id = ?
