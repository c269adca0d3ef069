DELETE FROM holdfast.collect_parts WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM holdfast.collect_parts WHERE transaction_id = $1::text LIMIT $2::bigint
)) RETURNING ordinal
