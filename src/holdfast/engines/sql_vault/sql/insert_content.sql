INSERT INTO contents (letter, properties, blob, headers, shown, error_stack, body)
VALUES (:id, :properties, :blob, :headers, :shown, :error_stack, :body)
