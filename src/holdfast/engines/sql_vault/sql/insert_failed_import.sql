INSERT INTO failed_imports (id, queue, reason, at, properties, body)
VALUES (:id, :queue, :reason, :now, :properties, :body)
