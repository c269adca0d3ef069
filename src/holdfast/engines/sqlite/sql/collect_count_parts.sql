SELECT series, count(*), sum(size_bytes), max(ordinal) FROM parts
WHERE transaction_id = ?1 GROUP BY series
