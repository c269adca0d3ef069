DELETE FROM leases WHERE id IN (SELECT value FROM json_each(?))
