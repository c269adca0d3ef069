DELETE FROM holdfast.arrivals WHERE ctid = ANY (ARRAY (
    SELECT known.place FROM unnest($2::text[]) AS wanted (source_id) CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.arrivals
        WHERE queue = $1::bigint AND arrivals.source_id = wanted.source_id OFFSET 0) AS known))
