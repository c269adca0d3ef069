UPDATE items SET id = ?2 WHERE id = ?1
