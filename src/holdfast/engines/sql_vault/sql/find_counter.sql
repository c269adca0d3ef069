SELECT value FROM counters WHERE name = :name
