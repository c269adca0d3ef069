SELECT created_at, expire_at, attempts FROM leases WHERE id = ?
