INSERT INTO plans (hash, document, at) VALUES (:hash, :document, :now)
ON CONFLICT (hash) DO UPDATE SET document = excluded.document, at = excluded.at
