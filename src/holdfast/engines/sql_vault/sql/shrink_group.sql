UPDATE failure_groups SET count = count - :count WHERE key = :key
