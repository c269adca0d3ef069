UPDATE failure_groups SET status = :status, note = :note WHERE key = :key
