SELECT queued, leased, scheduled, dying FROM partitions WHERE partition = ?
