SELECT name FROM holdfast.queues WHERE dead_queue = $1::text AND dead_queue <> '' ORDER BY name
