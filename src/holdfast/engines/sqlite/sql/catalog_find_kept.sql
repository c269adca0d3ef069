SELECT value FROM kept WHERE key = ?
