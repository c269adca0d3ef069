SELECT generation, record FROM holdfast.queues WHERE name = $1::text AND record <> ''
