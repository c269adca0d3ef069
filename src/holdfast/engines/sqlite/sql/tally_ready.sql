SELECT count(*), coalesce(sum(?3 - created_at), 0), coalesce(sum(expire_at <= ?3 OR attempts >= ?4), 0)
FROM ready WHERE id BETWEEN ?1 AND ?2
