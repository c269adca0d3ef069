-- name: count_rows
SELECT id >> 53, 'queued', count(*) FROM ready GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'leased', count(*) FROM leases GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'scheduled', count(*) FROM scheduled GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'dying', count(*) FROM dying GROUP BY id >> 53

-- name: delete_arrival
DELETE FROM arrivals WHERE source_id = ?

-- name: delete_dying
DELETE FROM dying WHERE id = ?

-- name: delete_item
DELETE FROM items WHERE id = ?

-- name: delete_items
DELETE FROM items WHERE id IN (SELECT value FROM json_each(?))

-- name: delete_lease
DELETE FROM leases WHERE id = ?

-- name: delete_leased_from_ready
DELETE FROM ready WHERE id BETWEEN ?1 AND ?2 AND expire_at > ?3 AND attempts < ?4

-- name: delete_leases
DELETE FROM leases WHERE id IN (SELECT value FROM json_each(?))

-- name: delete_ready
DELETE FROM ready WHERE id = ?

-- name: delete_scheduled
DELETE FROM scheduled WHERE id = ?

-- name: extend_lease
UPDATE leases SET lease_deadline = ?2 WHERE id = ?1

-- name: find_dedupe_key
SELECT id FROM items WHERE dedupe_key = ?

-- name: find_dying
SELECT created_at, expire_at, attempts FROM dying WHERE id = ?

-- name: find_lease
SELECT created_at, expire_at, attempts FROM leases WHERE id = ?

-- name: find_ready
SELECT 1 FROM ready WHERE id = ?

-- name: find_redrivable
SELECT r.created_at, r.expire_at, r.attempts FROM ready r JOIN items i ON i.id = r.id
WHERE r.id = ?1 AND i.source_queue = ?2

-- name: find_source_id
SELECT 1 FROM items WHERE source_id = ?

-- name: free_keys
UPDATE items SET former_key = coalesce(dedupe_key, former_key), dedupe_key = NULL, source_id = NULL
WHERE id = ? AND (dedupe_key IS NOT NULL OR source_id IS NOT NULL)

-- name: insert_arrival
INSERT INTO arrivals (source_id, source_queue) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: insert_bare_items
-- The payloads are an array that is bound as one value; nothing goes back to Python from its first row to its last.
INSERT INTO items (id, kind, encoding, reference, payload)
SELECT ?1 + a.rowid - 1, '', '', '', a.value FROM carray(?2) a

-- name: insert_dying
INSERT INTO dying
    (id, created_at, expire_at, attempts, reason, died_at,
     target_queue, target_generation, target_partition, target_storage, target_expire_timeout)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_item
INSERT INTO items (id, kind, encoding, reference, payload) VALUES (?, ?, ?, ?, ?)

-- name: insert_item_with_story
INSERT INTO items
    (id, kind, encoding, reference, dedupe_key, source_id, source_queue, death_reason, death_attempts, died_at, former_key,
     payload)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_items
INSERT INTO items (id, kind, encoding, reference, payload) VALUES

-- name: insert_lease
INSERT INTO leases (id, created_at, expire_at, attempts, leased_at, lease_deadline) VALUES (?, ?, ?, ?, ?, ?)

-- name: insert_ledger
INSERT INTO ledger (at, action, item_id, reason, count, detail) VALUES (?, ?, ?, ?, ?, ?)

-- name: insert_partition
INSERT INTO partitions (partition) VALUES (?) ON CONFLICT DO NOTHING

-- name: insert_ready
INSERT INTO ready (id, created_at, expire_at, attempts) VALUES (?, ?, ?, ?)

-- name: insert_ready_range
INSERT INTO ready (id, created_at, expire_at, attempts)
SELECT id, ?3, ?4, 0 FROM items WHERE id BETWEEN ?1 AND ?2

-- name: insert_scheduled
INSERT INTO scheduled (id, created_at, expire_at, attempts, enqueue_at) VALUES (?, ?, ?, ?, ?)

-- name: lease_ready
INSERT INTO leases (id, created_at, expire_at, attempts, leased_at, lease_deadline)
SELECT id, created_at, expire_at, attempts + 1, ?5, ?6
FROM ready WHERE id BETWEEN ?1 AND ?2 AND expire_at > ?3 AND attempts < ?4

-- name: list_items
SELECT i.id, s.attempts, s.created_at, s.expire_at, s.lease_deadline, 0, i.kind, i.encoding, i.reference,
    i.payload, i.dedupe_key, i.source_id, i.source_queue, i.death_reason, i.death_attempts, i.died_at, i.former_key
FROM (
    SELECT * FROM (SELECT id, attempts, created_at, expire_at, 0 AS lease_deadline
                   FROM ready WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3)
    UNION ALL
    SELECT * FROM (SELECT id, attempts, created_at, expire_at, lease_deadline
                   FROM leases WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3)
) s JOIN items i ON i.id = s.id
ORDER BY i.id LIMIT ?3

-- name: list_scheduled
SELECT i.id, s.attempts, s.created_at, s.expire_at, 0, s.enqueue_at, i.kind, i.encoding, i.reference,
    i.payload, i.dedupe_key, i.source_id, i.source_queue, i.death_reason, i.death_attempts, i.died_at, i.former_key
FROM scheduled s JOIN items i ON i.id = s.id
WHERE s.id BETWEEN ?1 AND ?2 ORDER BY s.id LIMIT ?3

-- name: next_moments
SELECT
    (SELECT min(lease_deadline) FROM leases),
    (SELECT min(enqueue_at) FROM scheduled),
    (SELECT min(expire_at) FROM ready),
    (SELECT i.died_at FROM items i
     WHERE i.died_at IS NOT NULL AND EXISTS (SELECT 1 FROM ready r WHERE r.id = i.id) ORDER BY i.died_at LIMIT 1)

-- name: release_lease
INSERT INTO ready (id, created_at, expire_at, attempts)
SELECT id, created_at, expire_at, attempts - 1 FROM leases WHERE id = ?

-- name: renumber_item
UPDATE items SET id = ?2, first_id = coalesce(first_id, id) WHERE id = ?1

-- name: select_arrivals
SELECT source_id FROM arrivals WHERE source_queue = ? LIMIT ?

-- name: select_dying
SELECT d.id, d.reason, d.attempts, d.died_at,
    d.target_queue, d.target_generation, d.target_partition, d.target_storage, d.target_expire_timeout,
    i.kind, i.encoding, i.reference, i.payload, i.former_key
FROM dying d JOIN items i ON i.id = d.id
WHERE d.id BETWEEN ?1 AND ?2 ORDER BY d.id LIMIT ?3

-- name: select_expired
SELECT id, created_at, expire_at, attempts FROM ready
WHERE expire_at <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY expire_at, id LIMIT ?4

-- name: select_lease_ids
SELECT id FROM leases WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3

-- name: select_leases_run_out
SELECT id, created_at, expire_at, attempts FROM leases
WHERE lease_deadline <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY lease_deadline, id LIMIT ?4

-- name: select_ledger
SELECT at, action, item_id, reason, count, detail FROM ledger WHERE entry > ?1 ORDER BY entry LIMIT ?2

-- name: select_partitions
SELECT partition, queued, leased, scheduled, dying, last_sequence, exact FROM partitions

-- name: select_past_retention
SELECT r.id, r.created_at, r.expire_at, r.attempts FROM items i JOIN ready r ON r.id = i.id
WHERE i.died_at IS NOT NULL AND i.died_at <= ?1 AND i.id BETWEEN ?2 AND ?3
ORDER BY i.died_at LIMIT ?4

-- name: select_ready
SELECT r.id, r.attempts + 1, i.payload, i.encoding, i.kind, i.reference, i.first_id
FROM ready r JOIN items i ON i.id = r.id
WHERE r.id BETWEEN ?1 AND ?2 AND r.expire_at > ?3 AND r.attempts < ?4
ORDER BY r.id LIMIT ?5

-- name: select_ready_ids
SELECT id FROM ready WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3

-- name: select_scheduled_ids
SELECT id FROM scheduled WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3

-- name: select_schedules_due
SELECT id, created_at, expire_at, attempts FROM scheduled
WHERE enqueue_at <= ?1 AND id BETWEEN ?2 AND ?3
ORDER BY enqueue_at, id LIMIT ?4

-- name: select_used_up
SELECT id, created_at, expire_at, attempts FROM ready
WHERE attempts > 0 AND attempts >= ?1 AND id BETWEEN ?2 AND ?3
LIMIT ?4

-- name: tally_leases
SELECT count(*), coalesce(sum(?3 - created_at), 0), coalesce(sum(?3 - leased_at), 0)
FROM leases WHERE id BETWEEN ?1 AND ?2

-- name: tally_others
SELECT (SELECT count(*) FROM scheduled WHERE id BETWEEN ?1 AND ?2), (SELECT count(*) FROM dying WHERE id BETWEEN ?1 AND ?2)

-- name: tally_ready
SELECT count(*), coalesce(sum(?3 - created_at), 0), coalesce(sum(expire_at <= ?3 OR attempts >= ?4), 0)
FROM ready WHERE id BETWEEN ?1 AND ?2

-- name: update_partition
UPDATE partitions SET queued = ?2, leased = ?3, scheduled = ?4, dying = ?5, last_sequence = ?6, exact = ?7
WHERE partition = ?1
