DELETE FROM holdfast.items WHERE id = ANY ($1::bigint[])
