SELECT source_id FROM holdfast.arrivals WHERE queue + 0 = $1::bigint AND source_queue = $2::text LIMIT $3::bigint
