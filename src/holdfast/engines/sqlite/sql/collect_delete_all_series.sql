DELETE FROM series WHERE transaction_id = ?1
