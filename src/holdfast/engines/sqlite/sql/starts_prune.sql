DELETE FROM starts
WHERE begun_at < ?1
   OR number <= (SELECT number FROM starts ORDER BY number DESC LIMIT 1 OFFSET ?2)
