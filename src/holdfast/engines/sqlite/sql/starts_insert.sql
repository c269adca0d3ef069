INSERT INTO starts (queue, key, begun_at) VALUES (?, ?, ?) RETURNING number
