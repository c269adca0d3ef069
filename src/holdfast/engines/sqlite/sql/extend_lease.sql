UPDATE leases SET lease_deadline = ?2 WHERE id = ?1
