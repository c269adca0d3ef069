DELETE FROM series WHERE transaction_id = ?1 AND series = ?2 AND count IS NULL AND stored_count = 0
