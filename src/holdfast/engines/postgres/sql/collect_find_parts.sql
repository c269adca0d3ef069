SELECT part.series, part.ordinal, part.path, part.size_bytes, part.sha256
FROM unnest($2::text[], $3::bigint[]) AS given (series, ordinal)
CROSS JOIN LATERAL (
    SELECT * FROM holdfast.collect_parts AS part
    WHERE part.transaction_id = $1::text AND part.series = given.series AND part.ordinal = given.ordinal
    OFFSET 0
) AS part
