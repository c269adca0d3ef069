-- name: collect_add_stored
INSERT INTO series (transaction_id, series, stored_count, stored_bytes) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT DO UPDATE SET stored_count = stored_count + ?3, stored_bytes = stored_bytes + ?4

-- name: collect_count_parts
SELECT series, count(*), sum(size_bytes), max(ordinal) FROM parts
WHERE transaction_id = ?1 GROUP BY series

-- name: collect_delete_all_series
DELETE FROM series WHERE transaction_id = ?1

-- name: collect_delete_part
DELETE FROM parts WHERE transaction_id = ?1 AND series = ?2 AND ordinal = ?3 AND sha256 = ?4

-- name: collect_delete_parts
DELETE FROM parts WHERE (transaction_id, series, ordinal) IN (
    SELECT transaction_id, series, ordinal FROM parts WHERE transaction_id = ?1 LIMIT ?2
)

-- name: collect_delete_strays
DELETE FROM strays WHERE transaction_id = ?1

-- name: collect_drop_series
DELETE FROM series WHERE transaction_id = ?1 AND series = ?2 AND count IS NULL AND stored_count = 0

-- name: collect_extend
UPDATE transactions SET lease_deadline = ?3 WHERE id = ?1 AND fence = ?2 RETURNING id

-- name: collect_find
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM transactions WHERE id = ?1

-- name: collect_find_part
SELECT series, ordinal, path, size_bytes, sha256 FROM parts
WHERE transaction_id = ?1 AND series = ?2 AND ordinal = ?3

-- name: collect_find_request
SELECT request FROM transactions WHERE id = ?1

-- name: collect_give_back
UPDATE transactions SET owner = '', fence = fence + 1, lease_deadline = 0 WHERE id = ?1 AND fence = ?2

-- name: collect_hold
UPDATE transactions SET progress_at = ?3 WHERE id = ?1 AND fence = ?2 RETURNING state

-- name: collect_insert
INSERT INTO transactions (id, state, producer, notify, series, created_at, updated_at, progress_at, owner, lease_deadline, request)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO NOTHING

-- name: collect_insert_ledger
INSERT INTO ledger (at, transaction_id, action, reason, detail) VALUES (?1, ?2, ?3, ?4, ?5)

-- name: collect_insert_part
INSERT INTO parts (transaction_id, series, ordinal, path, size_bytes, sha256)
VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING

-- name: collect_insert_stray
INSERT INTO strays (transaction_id, path) VALUES (?1, ?2) ON CONFLICT DO NOTHING

-- name: collect_list
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM transactions WHERE id > ?1 ORDER BY id LIMIT ?2

-- name: collect_move
UPDATE transactions SET state = ?4, reason = ?5, updated_at = ?6, progress_at = ?6
WHERE id = ?1 AND fence = ?2 AND state = ?3
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_put_header
INSERT INTO series (transaction_id, series, count, series_count) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT DO UPDATE SET count = ?3, series_count = coalesce(?4, series_count)

-- name: collect_remove_header
UPDATE series SET count = NULL, series_count = NULL WHERE transaction_id = ?1 AND series = ?2

-- name: collect_seize
UPDATE transactions SET owner = ?2, fence = fence + 1, lease_deadline = ?3 WHERE id = ?1
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_select_idle
SELECT id FROM transactions WHERE is_clean = 0 AND progress_at <= ?1
AND state IN ('forwarding', 'awaiting', 'sending') ORDER BY id LIMIT ?2

-- name: collect_select_ledger
SELECT at, transaction_id, action, reason, detail FROM ledger ORDER BY number LIMIT ?2 OFFSET ?1

-- name: collect_select_parts
SELECT series, ordinal, path, size_bytes, sha256 FROM parts
WHERE transaction_id = ?1 AND series = ?2 AND ordinal >= ?3 ORDER BY ordinal LIMIT ?4

-- name: collect_select_ranges
SELECT min(ordinal), max(ordinal) FROM (
    SELECT ordinal, ordinal - row_number() OVER (ORDER BY ordinal) AS run FROM parts
    WHERE transaction_id = ?1 AND series = ?2
) GROUP BY run ORDER BY 1 LIMIT ?3

-- name: collect_select_series
SELECT series, count, series_count, stored_count, stored_bytes FROM series
WHERE transaction_id = ?1 ORDER BY series

-- name: collect_select_strays
SELECT path FROM strays WHERE transaction_id = ?1

-- name: collect_set_clean
UPDATE transactions SET is_clean = 1, owner = '', fence = fence + 1, updated_at = ?3, request = x''
WHERE id = ?1 AND fence = ?2 RETURNING id

-- name: collect_take
UPDATE transactions SET owner = ?1, fence = fence + 1, lease_deadline = ?2
WHERE id IN (SELECT id FROM transactions WHERE is_clean = 0 AND owner <> ?1 ORDER BY id LIMIT ?3)
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
