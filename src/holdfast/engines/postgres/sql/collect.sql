-- name: collect_count_parts
SELECT series, count(*), sum(size_bytes)::bigint, max(ordinal) FROM holdfast.collect_parts
WHERE transaction_id = $1::text GROUP BY series

-- name: collect_delete_all_series
DELETE FROM holdfast.collect_series WHERE transaction_id = $1::text

-- name: collect_delete_part
WITH gone AS (
    DELETE FROM holdfast.collect_parts
    WHERE transaction_id = $1::text AND series = $2::text AND ordinal = $3::bigint AND sha256 = $4::text
    RETURNING size_bytes
)
UPDATE holdfast.collect_series AS known
SET stored_count = stored_count - 1, stored_bytes = stored_bytes - gone.size_bytes
FROM gone WHERE known.transaction_id = $1::text AND known.series = $2::text

-- name: collect_delete_parts
DELETE FROM holdfast.collect_parts WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM holdfast.collect_parts WHERE transaction_id = $1::text LIMIT $2::bigint
)) RETURNING ordinal

-- name: collect_delete_strays
DELETE FROM holdfast.collect_strays WHERE transaction_id = $1::text

-- name: collect_drop_series
DELETE FROM holdfast.collect_series
WHERE transaction_id = $1::text AND series = ANY ($2::text[]) AND count IS NULL AND stored_count = 0

-- name: collect_extend
UPDATE holdfast.collect_transactions SET lease_deadline = holdfast.collect_now_us() + $3::bigint
FROM unnest($1::text[], $2::bigint[]) AS given (id, fence)
WHERE collect_transactions.id = given.id AND collect_transactions.fence = given.fence
RETURNING collect_transactions.id

-- name: collect_find
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM holdfast.collect_transactions WHERE id = $1::text

-- name: collect_find_parts
SELECT part.series, part.ordinal, part.path, part.size_bytes, part.sha256
FROM unnest($2::text[], $3::bigint[]) AS given (series, ordinal)
CROSS JOIN LATERAL (
    SELECT * FROM holdfast.collect_parts AS part
    WHERE part.transaction_id = $1::text AND part.series = given.series AND part.ordinal = given.ordinal
    OFFSET 0
) AS part

-- name: collect_find_request
SELECT request FROM holdfast.collect_transactions WHERE id = $1::text

-- name: collect_give_back
UPDATE holdfast.collect_transactions SET owner = '', fence = fence + 1, lease_deadline = 0
WHERE id = $1::text AND fence = $2::bigint

-- name: collect_hold
UPDATE holdfast.collect_transactions SET progress_at = holdfast.collect_now_us()
WHERE id = $1::text AND fence = $2::bigint RETURNING id

-- name: collect_insert
INSERT INTO holdfast.collect_transactions
    (id, state, producer, notify, series, created_at, updated_at, progress_at, owner, lease_deadline, request)
SELECT $1::text, $2::text, $3::text, $4::text, $5::text, now, now, now, $6::text, now + $7::bigint, $8::bytea
FROM holdfast.collect_now_us() AS now
ON CONFLICT (id) DO NOTHING

-- name: collect_insert_ledger
INSERT INTO holdfast.collect_ledger (at, transaction_id, action, reason, detail)
VALUES (holdfast.collect_now_us(), $1::text, $2::text, $3::text, $4::text)

-- name: collect_insert_parts
-- Insert if absent, and add what is new to the series' counts, in one statement.
WITH put AS (
    INSERT INTO holdfast.collect_parts (transaction_id, series, ordinal, path, size_bytes, sha256)
    SELECT $1::text, given.* FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[]) AS given (series, ordinal, path, size_bytes, sha256)
    ON CONFLICT DO NOTHING
    RETURNING series, size_bytes
)
INSERT INTO holdfast.collect_series AS known (transaction_id, series, stored_count, stored_bytes)
SELECT $1::text, series, count(*), sum(size_bytes)::bigint FROM put GROUP BY series
ON CONFLICT (transaction_id, series) DO UPDATE
SET stored_count = known.stored_count + excluded.stored_count, stored_bytes = known.stored_bytes + excluded.stored_bytes

-- name: collect_insert_strays
INSERT INTO holdfast.collect_strays (transaction_id, path) SELECT $1::text, unnest($2::text[])
ON CONFLICT DO NOTHING

-- name: collect_list
SELECT id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
FROM holdfast.collect_transactions WHERE id > $1::text ORDER BY id LIMIT $2::bigint

-- name: collect_move
UPDATE holdfast.collect_transactions SET state = $4::text, reason = $5::text,
    updated_at = holdfast.collect_now_us(), progress_at = holdfast.collect_now_us()
WHERE id = $1::text AND fence = $2::bigint AND state = $3::text
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_put_header
INSERT INTO holdfast.collect_series AS known (transaction_id, series, count, series_count)
VALUES ($1::text, $2::text, $3::bigint, $4::bigint)
ON CONFLICT (transaction_id, series) DO UPDATE
SET count = excluded.count, series_count = coalesce(excluded.series_count, known.series_count)

-- name: collect_remove_header
UPDATE holdfast.collect_series SET count = NULL, series_count = NULL WHERE transaction_id = $1::text AND series = $2::text

-- name: collect_seize
UPDATE holdfast.collect_transactions
SET owner = $2::text, fence = fence + 1, lease_deadline = holdfast.collect_now_us() + $3::bigint WHERE id = $1::text
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean

-- name: collect_select_idle
SELECT id FROM holdfast.collect_transactions
WHERE NOT is_clean AND progress_at <= holdfast.collect_now_us() - $1::bigint AND state IN ('forwarding', 'awaiting', 'sending')
ORDER BY id LIMIT $2::bigint

-- name: collect_select_ledger
SELECT at, transaction_id, action, reason, detail FROM holdfast.collect_ledger
ORDER BY number LIMIT $2::bigint OFFSET $1::bigint

-- name: collect_select_parts
SELECT series, ordinal, path, size_bytes, sha256 FROM holdfast.collect_parts
WHERE transaction_id = $1::text AND series = $2::text AND ordinal >= $3::bigint ORDER BY ordinal LIMIT $4::bigint

-- name: collect_select_ranges
SELECT min(ordinal), max(ordinal) FROM (
    SELECT ordinal, ordinal - row_number() OVER (ORDER BY ordinal) AS run FROM holdfast.collect_parts
    WHERE transaction_id = $1::text AND series = $2::text
) AS numbered GROUP BY run ORDER BY 1 LIMIT $3::bigint

-- name: collect_select_series
SELECT series, count, series_count, stored_count, stored_bytes FROM holdfast.collect_series
WHERE transaction_id = $1::text ORDER BY series

-- name: collect_select_strays
SELECT path FROM holdfast.collect_strays WHERE transaction_id = $1::text

-- name: collect_set_clean
UPDATE holdfast.collect_transactions SET is_clean = true, owner = '', fence = fence + 1, updated_at = holdfast.collect_now_us(), request = ''
WHERE id = $1::text AND fence = $2::bigint RETURNING id

-- name: collect_take
-- $1 owner, $2 lease, $3 how many. Rows that another collector is just taking are left to it.
UPDATE holdfast.collect_transactions SET owner = $1::text, fence = fence + 1, lease_deadline = holdfast.collect_now_us() + $2::bigint
WHERE id = ANY (ARRAY (
    SELECT id FROM holdfast.collect_transactions
    WHERE NOT is_clean AND owner <> $1::text AND lease_deadline < holdfast.collect_now_us()
    ORDER BY id LIMIT $3::bigint FOR UPDATE SKIP LOCKED
))
RETURNING id, state, producer, notify, series, reason, created_at, updated_at, progress_at, owner, fence, is_clean
