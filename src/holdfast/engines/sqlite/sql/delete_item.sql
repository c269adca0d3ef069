DELETE FROM items WHERE id = ?
