DELETE FROM holdfast.arrivals WHERE queue = $1::bigint
