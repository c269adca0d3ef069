DELETE FROM files WHERE generation = ?
