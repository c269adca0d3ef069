INSERT INTO holdfast.collect_strays (transaction_id, path) SELECT $1::text, unnest($2::text[])
ON CONFLICT DO NOTHING
