SELECT sample, key, title, count, first_at, last_at, status, note FROM failure_groups WHERE key = :key
