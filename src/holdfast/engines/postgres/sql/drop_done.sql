DELETE FROM holdfast.dropped WHERE generation = $1::bigint
