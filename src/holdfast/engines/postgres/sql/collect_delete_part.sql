WITH gone AS (
    DELETE FROM holdfast.collect_parts
    WHERE transaction_id = $1::text AND series = $2::text AND ordinal = $3::bigint AND sha256 = $4::text
    RETURNING size_bytes
)
UPDATE holdfast.collect_series AS known
SET stored_count = stored_count - 1, stored_bytes = stored_bytes - gone.size_bytes
FROM gone WHERE known.transaction_id = $1::text AND known.series = $2::text
