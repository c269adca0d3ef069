SELECT series, ordinal, path, size_bytes, sha256 FROM holdfast.collect_parts
WHERE transaction_id = $1::text AND series = $2::text AND ordinal >= $3::bigint ORDER BY ordinal LIMIT $4::bigint
