SELECT request FROM transactions WHERE id = ?1
