SELECT name FROM queues WHERE dead_queue = ? AND dead_queue <> '' ORDER BY name
