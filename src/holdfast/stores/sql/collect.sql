-- The names of tables are PostgreSQL's, where they share a schema with others. Moments are by the database's own clock,
-- which is that of all who share it.

-- name: collect_add_stored
INSERT INTO collect_series (transaction_id, series, stored_count, stored_bytes)
VALUES (:transaction, :series, :count, :size_bytes)
ON CONFLICT (transaction_id, series) DO UPDATE SET stored_count = collect_series.stored_count + excluded.stored_count,
    stored_bytes = collect_series.stored_bytes + excluded.stored_bytes

-- name: collect_count_parts
SELECT series, count(*), CAST(sum(size_bytes) AS bigint), max(ordinal) FROM collect_parts
WHERE transaction_id = :transaction GROUP BY series

-- name: collect_delete_all_series
DELETE FROM collect_series WHERE transaction_id = :transaction

-- name: collect_delete_part
DELETE FROM collect_parts
WHERE transaction_id = :transaction AND series = :series AND ordinal = :ordinal AND sha256 = :sha256
RETURNING size_bytes

-- name: collect_delete_parts
DELETE FROM collect_parts WHERE transaction_id = :transaction AND (series, ordinal) <= (
    SELECT series, ordinal FROM (
        SELECT series, ordinal FROM collect_parts WHERE transaction_id = :transaction
        ORDER BY series, ordinal LIMIT :count_max
    ) AS page ORDER BY series DESC, ordinal DESC LIMIT 1
) RETURNING ordinal

-- name: collect_delete_strays
DELETE FROM collect_strays WHERE transaction_id = :transaction

-- name: collect_drop_series
DELETE FROM collect_series
WHERE transaction_id = :transaction AND series = :series AND count IS NULL AND stored_count = 0

-- name: collect_extend
UPDATE collect_transactions SET lease_deadline = collect_now_us() + :lease_us
WHERE id = :transaction AND fence = :fence RETURNING id

-- name: collect_find
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM collect_transactions WHERE id = :transaction

-- name: collect_find_parts
-- By its key, each of them: a join would be planned by statistics that a growing table leaves behind.
SELECT given.value ->> 0, CAST(given.value ->> 1 AS bigint),
    (SELECT path FROM collect_parts WHERE transaction_id = :transaction
        AND series = (given.value ->> 0) AND ordinal = CAST(given.value ->> 1 AS bigint)),
    (SELECT size_bytes FROM collect_parts WHERE transaction_id = :transaction
        AND series = (given.value ->> 0) AND ordinal = CAST(given.value ->> 1 AS bigint)),
    (SELECT sha256 FROM collect_parts WHERE transaction_id = :transaction
        AND series = (given.value ->> 0) AND ordinal = CAST(given.value ->> 1 AS bigint))
FROM GIVEN_ROWS

-- name: collect_find_request
SELECT request FROM collect_transactions WHERE id = :transaction

-- name: collect_give_back
UPDATE collect_transactions SET owner = '', fence = fence + 1, lease_deadline = 0
WHERE id = :transaction AND fence = :fence

-- name: collect_hold
UPDATE collect_transactions SET progress_at = collect_now_us()
WHERE id = :transaction AND fence = :fence RETURNING id

-- name: collect_insert
INSERT INTO collect_transactions
    (id, state, producer, notify, series, created_at, updated_at, progress_at, owner, lease_deadline, request)
SELECT :transaction, :state, :producer, :notify, :series, now_us, now_us, now_us, :owner, now_us + :lease_us, :request
FROM (SELECT collect_now_us() AS now_us) AS moment WHERE true
ON CONFLICT (id) DO NOTHING

-- name: collect_insert_ledger
INSERT INTO collect_ledger (at, transaction_id, action, reason, detail)
VALUES (collect_now_us(), :transaction, :action, :reason, :detail)

-- name: collect_insert_parts
INSERT INTO collect_parts (transaction_id, series, ordinal, path, size_bytes, sha256)
SELECT :transaction, given.value ->> 0, CAST(given.value ->> 1 AS bigint), given.value ->> 2,
    CAST(given.value ->> 3 AS bigint), given.value ->> 4
FROM GIVEN_ROWS WHERE true
ON CONFLICT (transaction_id, series, ordinal) DO NOTHING RETURNING series, ordinal, path, size_bytes

-- name: collect_insert_stray
INSERT INTO collect_strays (transaction_id, path) VALUES (:transaction, :path)
ON CONFLICT (transaction_id, path) DO NOTHING

-- name: collect_list
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM collect_transactions WHERE id > :after ORDER BY id LIMIT :count_max

-- name: collect_list_unfinished
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM collect_transactions WHERE is_clean IS_FALSE AND id > :after ORDER BY id LIMIT :count_max

-- name: collect_move
UPDATE collect_transactions SET state = :target, reason = :reason, updated_at = collect_now_us(), progress_at = collect_now_us()
WHERE id = :transaction AND fence = :fence AND state = :source
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_put_header
INSERT INTO collect_series (transaction_id, series, count, series_count)
VALUES (:transaction, :series, :count, :series_count)
ON CONFLICT (transaction_id, series) DO UPDATE SET count = excluded.count,
    series_count = coalesce(excluded.series_count, collect_series.series_count)

-- name: collect_remove_header
UPDATE collect_series SET count = NULL, series_count = NULL WHERE transaction_id = :transaction AND series = :series

-- name: collect_seize
UPDATE collect_transactions SET owner = :owner, fence = fence + 1, lease_deadline = collect_now_us() + :lease_us
WHERE id = :transaction
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_select_idle
SELECT id FROM collect_transactions
WHERE is_clean IS_FALSE AND progress_at <= collect_now_us() - :for_us AND state IN ('forwarding', 'awaiting', 'sending')
ORDER BY id LIMIT :count_max

-- name: collect_select_ledger
SELECT at, transaction_id, action, reason, detail FROM collect_ledger
ORDER BY number LIMIT :count_max OFFSET :after

-- name: collect_select_parts
SELECT series, ordinal, path, size_bytes, sha256 FROM collect_parts
WHERE transaction_id = :transaction AND series = :series AND ordinal >= :first ORDER BY ordinal LIMIT :count_max

-- name: collect_select_ranges
SELECT min(ordinal), max(ordinal) FROM (
    SELECT ordinal, ordinal - row_number() OVER (ORDER BY ordinal) AS run FROM collect_parts
    WHERE transaction_id = :transaction AND series = :series
) AS numbered GROUP BY run ORDER BY 1 LIMIT :count_max

-- name: collect_select_series
SELECT series, count, series_count, stored_count, stored_bytes FROM collect_series
WHERE transaction_id = :transaction ORDER BY series

-- name: collect_select_strays
SELECT path FROM collect_strays WHERE transaction_id = :transaction

-- name: collect_set_clean
UPDATE collect_transactions SET is_clean = true, owner = '', fence = fence + 1, updated_at = collect_now_us(), request = :nothing
WHERE id = :transaction AND fence = :fence RETURNING id

-- name: collect_take
-- Rows that another collector is just taking are left to it; which are ours is asked once.
WITH taken AS MATERIALIZED (
    SELECT id FROM collect_transactions
    WHERE is_clean IS_FALSE AND owner <> :owner AND (:is_shared = 0 OR lease_deadline < collect_now_us())
    ORDER BY id LIMIT :count_max SKIP_LOCKED
)
UPDATE collect_transactions SET owner = :owner, fence = fence + 1, lease_deadline = collect_now_us() + :lease_us
WHERE id IN (SELECT id FROM taken)
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
