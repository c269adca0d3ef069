DELETE FROM parts WHERE transaction_id = ?1 AND series = ?2 AND ordinal = ?3 AND sha256 = ?4
