INSERT INTO strays (transaction_id, path) VALUES (?1, ?2) ON CONFLICT DO NOTHING
