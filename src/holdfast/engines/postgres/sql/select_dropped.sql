SELECT generation FROM holdfast.dropped LIMIT 100
