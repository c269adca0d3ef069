SELECT value FROM holdfast.kept WHERE key = $1::text
