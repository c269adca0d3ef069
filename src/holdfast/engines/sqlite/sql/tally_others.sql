SELECT (SELECT count(*) FROM scheduled WHERE id BETWEEN ?1 AND ?2), (SELECT count(*) FROM dying WHERE id BETWEEN ?1 AND ?2)
