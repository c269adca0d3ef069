SELECT generation, record FROM holdfast.queues WHERE record <> '' ORDER BY name
