SELECT min(ordinal), max(ordinal) FROM (
    SELECT ordinal, ordinal - row_number() OVER (ORDER BY ordinal) AS run FROM parts
    WHERE transaction_id = ?1 AND series = ?2
) GROUP BY run ORDER BY 1 LIMIT ?3
