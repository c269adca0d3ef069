SELECT holdfast.hold_queue($1::bigint, $2::bigint)
