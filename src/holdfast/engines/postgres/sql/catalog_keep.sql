INSERT INTO holdfast.kept (key, value) VALUES ($1::text, $2::text) ON CONFLICT DO NOTHING
