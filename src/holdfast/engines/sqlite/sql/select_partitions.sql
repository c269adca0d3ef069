SELECT partition, queued, leased, scheduled, dying, last_sequence, exact FROM partitions
