SELECT id, queue, reason, body, properties, at FROM failed_imports
WHERE id > :after ORDER BY id LIMIT :count_max
