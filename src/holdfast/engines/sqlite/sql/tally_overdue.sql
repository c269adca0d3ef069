SELECT count(*) FROM ready WHERE id BETWEEN ?1 AND ?2 AND (expire_at <= ?3 OR attempts >= ?4)
