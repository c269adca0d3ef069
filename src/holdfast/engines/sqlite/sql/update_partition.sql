UPDATE partitions SET queued = ?2, leased = ?3, scheduled = ?4, dying = ?5, last_sequence = ?6, exact = ?7
WHERE partition = ?1
