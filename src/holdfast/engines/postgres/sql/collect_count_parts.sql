SELECT series, count(*), sum(size_bytes)::bigint, max(ordinal) FROM holdfast.collect_parts
WHERE transaction_id = $1::text GROUP BY series
