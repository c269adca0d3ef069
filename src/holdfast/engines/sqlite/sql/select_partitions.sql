SELECT partition, queued, leased, scheduled, dying, last_sequence FROM partitions
