-- name: catalog_delete_queue
DELETE FROM queues WHERE generation = ?

-- name: catalog_doom_file
INSERT INTO files (generation, doomed) VALUES (?, 1) ON CONFLICT DO UPDATE SET doomed = 1

-- name: catalog_find_kept
SELECT value FROM kept WHERE key = ?

-- name: catalog_find_queue
SELECT generation, record FROM queues WHERE name = ?

-- name: catalog_forget_file
DELETE FROM files WHERE generation = ?

-- name: catalog_insert_file
INSERT INTO files (generation) VALUES (?) ON CONFLICT DO NOTHING

-- name: catalog_insert_ledger
INSERT INTO ledger (at, action, queue_name, item_id, reason, count, detail) VALUES (?, ?, ?, '', ?, ?, '')

-- name: catalog_insert_queue
INSERT INTO queues (name, dead_queue, record) VALUES (?, ?, ?)

-- name: catalog_keep
INSERT INTO kept (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: catalog_select_files
SELECT generation, doomed FROM files

-- name: catalog_select_ledger
SELECT at, action, queue_name, item_id, reason, count, detail FROM ledger WHERE entry > ?1 ORDER BY entry LIMIT ?2

-- name: catalog_select_queues
SELECT generation, record FROM queues ORDER BY name

-- name: catalog_select_sources
SELECT name FROM queues WHERE dead_queue = ? AND dead_queue <> '' ORDER BY name

-- name: catalog_update_queue
UPDATE queues SET dead_queue = ?2, record = ?3 WHERE generation = ?1
