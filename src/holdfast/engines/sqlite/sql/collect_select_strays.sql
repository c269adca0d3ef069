SELECT path FROM strays WHERE transaction_id = ?1
