DELETE FROM strays WHERE transaction_id = ?1
