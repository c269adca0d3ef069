INSERT INTO tokens (name, document) VALUES (:name, :document) ON CONFLICT (name) DO NOTHING RETURNING name
