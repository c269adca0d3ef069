DELETE FROM leases WHERE id = ?
