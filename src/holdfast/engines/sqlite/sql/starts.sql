-- name: starts_delete
DELETE FROM starts WHERE number IN (SELECT value FROM json_each(?))

-- name: starts_find
SELECT number FROM starts WHERE queue = ? AND key = ? ORDER BY number

-- name: starts_insert
INSERT INTO starts (queue, key, begun_at) VALUES (?, ?, ?) RETURNING number

-- name: starts_prune
DELETE FROM starts
WHERE begun_at < ?1
   OR number <= (SELECT number FROM starts ORDER BY number DESC LIMIT 1 OFFSET ?2)
