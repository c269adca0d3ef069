SELECT min(ordinal), max(ordinal) FROM (
    SELECT ordinal, ordinal - row_number() OVER (ORDER BY ordinal) AS run FROM holdfast.collect_parts
    WHERE transaction_id = $1::text AND series = $2::text
) AS numbered GROUP BY run ORDER BY 1 LIMIT $3::bigint
