SELECT generation, record FROM queues ORDER BY name
