DELETE FROM dying WHERE id = ?
