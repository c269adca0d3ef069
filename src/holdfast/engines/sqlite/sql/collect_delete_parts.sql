DELETE FROM parts WHERE (transaction_id, series, ordinal) IN (
    SELECT transaction_id, series, ordinal FROM parts WHERE transaction_id = ?1 LIMIT ?2
)
