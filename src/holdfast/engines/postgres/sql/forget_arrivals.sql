DELETE FROM holdfast.arrivals WHERE queue = $1::bigint AND source_id = ANY ($2::text[])
