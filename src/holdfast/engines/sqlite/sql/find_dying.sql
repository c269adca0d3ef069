SELECT created_at, expire_at, attempts FROM dying WHERE id = ?
