-- name: ack_letters
UPDATE letters SET acked = :acked WHERE id IN_IDS

-- name: add_group_hour
INSERT INTO group_hours (grp, hour, arrived) VALUES (:key, :hour, :count)
ON CONFLICT (grp, hour) DO UPDATE SET arrived = group_hours.arrived + excluded.arrived

-- name: add_queue_hour
INSERT INTO queue_hours (hour, queue, arrived, redriven, came_back)
VALUES (:hour, :queue, :arrived, :redriven, :came_back)
ON CONFLICT (hour, queue) DO UPDATE SET arrived = queue_hours.arrived + excluded.arrived,
    redriven = queue_hours.redriven + excluded.redriven, came_back = queue_hours.came_back + excluded.came_back

-- name: add_redriven_count
UPDATE letters SET redriven_count = redriven_count + 1 WHERE id IN_IDS

-- name: add_redrive_tally
INSERT INTO redrive_tallies (redrive, status, count) VALUES (:redrive, :status, :count)
ON CONFLICT (redrive, status) DO UPDATE SET count = redrive_tallies.count + excluded.count

-- name: add_tally
INSERT INTO tallies (queue, state, count) VALUES (:queue, :state, :count)
ON CONFLICT (queue, state) DO UPDATE SET count = tallies.count + excluded.count

-- name: announce_blob
INSERT INTO loose_blobs (blob, due_at) VALUES (:blob, :due_at)

-- name: change_group
UPDATE failure_groups SET status = :status, note = :note WHERE key = :key

-- name: claim_blob
DELETE FROM loose_blobs WHERE blob = :blob AND doomed = 0 RETURNING blob

-- name: count_came_back
SELECT r.redrive, count(*) FROM letters l CROSS JOIN redrive_letters r
WHERE l.state = 'came_back' AND r.letter = l.id AND r.redrive IN_IDS AND r.status NOT IN ('failed', 'skipped')
GROUP BY r.redrive

-- name: count_redrive_letters
SELECT redrive, status, count(*) FROM redrive_letters WHERE redrive IN_IDS GROUP BY redrive, status

-- name: count_redrive_reasons
SELECT why, count(*), min(letter) FROM (
    SELECT why, letter FROM redrive_letters WHERE redrive = :redrive AND status = :status
    ORDER BY letter LIMIT :looked_max) looked
GROUP BY why ORDER BY count(*) DESC, min(letter) LIMIT :count_max

-- name: count_repeated
SELECT redrive, count(*) FROM redrive_letters WHERE redrive IN_IDS AND repeated = 1 GROUP BY redrive

-- name: count_expired
SELECT count(*) FROM letters WHERE state = :state AND changed_at < :before

-- name: count_tallies
SELECT queue, state, count(*) FROM letters GROUP BY queue, state ORDER BY queue, state

-- name: delete_blob
DELETE FROM loose_blobs WHERE blob = :blob AND doomed = 1

-- name: delete_blobs_later
UPDATE loose_blobs SET doomed = 1
WHERE blob IN (SELECT blob FROM loose_blobs WHERE due_at <= :now ORDER BY due_at LIMIT :count_max)
RETURNING blob

-- name: delete_contents
DELETE FROM contents WHERE letter IN_IDS

-- name: delete_group_hours
DELETE FROM group_hours WHERE hour < :before

-- name: delete_letters
DELETE FROM letters WHERE id IN_IDS

-- name: delete_queue_hours
DELETE FROM queue_hours WHERE hour < :before

-- name: delete_recoveries
DELETE FROM recoveries WHERE id <= :last

-- name: delete_redrive_tallies
DELETE FROM redrive_tallies WHERE redrive = :redrive AND status <> 'came_back'

-- name: delete_revisions
DELETE FROM revisions WHERE letter IN_IDS

-- name: find_came_from
SELECT r.letter, l.queue, l.state, l.redriven_count, r.redrive
FROM redrive_letters r JOIN letters l ON l.id = r.letter
WHERE r.redrive_id = :redrive_id

-- name: find_counter
SELECT value FROM counters WHERE name = :name

-- name: find_next_origin
SELECT l.origin FROM redrives t JOIN redrive_letters r ON r.redrive = t.id JOIN letters l ON l.id = r.letter
WHERE t.id = :redrive AND t.state = 'running'
    AND (r.status = 'waiting' OR r.status IN ('leased', 'unknown') AND r.lease_until <= :now)
ORDER BY r.letter LIMIT 1

-- name: find_plan
SELECT document FROM plans WHERE hash = :hash

-- name: find_first_of_letter
SELECT min(number) FROM ledger WHERE first_letter > 0 AND first_letter <= :letter AND last_letter >= :letter

-- name: find_recovery
SELECT document FROM recoveries WHERE run = :run

-- name: find_redrive
SELECT state, holder, held_until FROM redrives WHERE id = :redrive

-- name: find_unacked
SELECT id FROM letters WHERE queue = :queue AND digest = :digest AND acked = 0 ORDER BY id LIMIT 1

-- name: free_blob
INSERT INTO loose_blobs (blob, due_at)
SELECT :blob, :due_at WHERE NOT EXISTS (SELECT 1 FROM contents WHERE blob = :blob)
ON CONFLICT (blob) DO NOTHING

-- name: insert_content
INSERT INTO contents (letter, properties, blob, headers, shown, error_stack, body)
VALUES (:id, :properties, :blob, :headers, :shown, :death_error_stack, :body)

-- name: insert_failed_import
INSERT INTO failed_imports (id, queue, reason, at, properties, body, seal)
VALUES (:id, :queue, :reason, :now, :properties, :body, :seal)

-- name: insert_ledger
INSERT INTO ledger (number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason,
    detail, mac, first_letter, last_letter, digest)
VALUES (:number, :at, :actor, :action, :origin, :outcome, :queue, :from_state, :to_state, :count, :letters, :reason,
    :detail, :mac, :first_letter, :last_letter, :digest)

-- name: insert_letter
INSERT INTO letters (id, queue, origin, state, message_id, type, exchange, routing_key, source_queue, reason,
    death_count, first_died_at, died_at, error_type, error_message, grp, redrive_id, redriven_count, captured_at,
    changed_at, body_bytes, digest, came_from, seal)
VALUES (:id, :queue, :origin, 'captured', :message_id, :type, :exchange, :routing_key, :death_queue, :death_reason,
    :death_count, :death_first_at_us, :death_last_at_us, :death_error_type, :death_error_message, :group, :redrive_id,
    :redriven_count, :now, :now, :body_bytes, :digest, :came_from, :seal)

-- name: insert_recovery
INSERT INTO recoveries (id, run, line, document) VALUES (:id, :run, :line, :document)

-- name: insert_redrive
INSERT INTO redrives (id, operation, state, name, reason, plan, wish, total, started_at, started_by, why)
VALUES (:id, :operation, 'running', :name, :reason, :plan, :wish, :total, :now, :actor, '')

-- name: insert_redrive_letter
INSERT INTO redrive_letters (redrive, letter, redrive_id, address, status)
VALUES (:redrive, :letter, :redrive_id, :address, 'waiting')

-- name: insert_revision
INSERT INTO revisions (letter, number, headers, dropped, at, actor, note, body, seal)
VALUES (:letter, :number, :headers, :dropped, :now, :actor, :note, :body, :seal)

-- name: insert_token
INSERT INTO tokens (name, document, seal) VALUES (:name, :document, :seal) ON CONFLICT (name) DO NOTHING RETURNING name

-- name: newest_ledger
SELECT number, mac, digest FROM ledger ORDER BY number DESC LIMIT 1

-- name: newest_moments
SELECT at FROM ledger ORDER BY number DESC LIMIT :count_max

-- name: next_failed
SELECT id, queue, reason, at, properties, body, seal FROM failed_imports WHERE id > :after ORDER BY id LIMIT 1

-- name: next_revision
SELECT number, letter, headers, dropped, at, actor, note, body, seal FROM revisions
WHERE letter = :letter AND number > :after ORDER BY number LIMIT 1

-- name: next_token
SELECT name, document, revoked_at, seal FROM tokens WHERE name > :after ORDER BY name LIMIT 1

-- name: oldest_death
SELECT died_at, captured_at FROM letters WHERE queue = :queue AND state = 'captured' ORDER BY id LIMIT 1

-- name: put_group
INSERT INTO failure_groups (key, title, count, first_at, last_at, sample, status, note)
VALUES (:key, :title, :count, :now, :now, :sample, 'open', '')
ON CONFLICT (key) DO UPDATE SET count = failure_groups.count + excluded.count, last_at = excluded.last_at,
    sample = excluded.sample,
    status = CASE WHEN failure_groups.status = 'resolved' THEN 'regressed' ELSE failure_groups.status END

-- name: put_plan
INSERT INTO plans (hash, document, at) VALUES (:hash, :document, :now)
ON CONFLICT (hash) DO UPDATE SET document = excluded.document, at = excluded.at

-- name: revoke_token
UPDATE tokens SET revoked_at = :now WHERE name = :name AND revoked_at = 0 RETURNING document, seal

-- name: seal_failed
UPDATE failed_imports SET seal = :seal WHERE id = :key

-- name: seal_letter
UPDATE letters SET seal = :seal WHERE id = :id

-- name: seal_revision
UPDATE revisions SET seal = :seal WHERE letter = :letter AND number = :number

-- name: seal_token
UPDATE tokens SET seal = :seal WHERE name = :key

-- name: select_acts
SELECT DISTINCT action, from_state, to_state FROM ledger WHERE number > :after

-- name: select_blobs
SELECT DISTINCT blob FROM contents WHERE letter IN_IDS AND blob <> ''

-- name: select_came_back_as
SELECT id, queue FROM letters WHERE came_from = :letter AND came_from > 0 ORDER BY id LIMIT 100

-- name: select_contents
SELECT letter, body, properties, blob FROM contents WHERE letter IN_IDS

-- name: select_deleted_tallies
SELECT queue, state, count FROM tallies WHERE state = 'deleted' AND count <> 0

-- name: select_expired
SELECT id, queue, state FROM letters WHERE state = :state AND changed_at < :before ORDER BY id LIMIT :count_max

-- name: select_failed_imports
SELECT id, queue, reason, at, body, properties FROM failed_imports
WHERE id > :after ORDER BY id LIMIT :count_max

-- name: select_group_counts
SELECT grp, count(*) FROM letters WHERE id IN_IDS GROUP BY grp

-- name: select_group
SELECT key, title, count, first_at, last_at, sample, status, note, (
    SELECT count(*) FROM (
        SELECT 1 AS one FROM letters WHERE grp = failure_groups.key AND state = 'captured' LIMIT :counted_max) captured)
FROM failure_groups

-- name: select_group_hours
SELECT grp, hour, arrived FROM group_hours
WHERE hour > :after AND grp IN (SELECT given.value ->> 0 FROM GIVEN_ROWS)

-- name: select_held_elsewhere
SELECT letter FROM redrive_letters WHERE letter IN_IDS AND redrive <> :redrive AND status IN ('leased', 'unknown')

-- name: select_ledger
SELECT number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac
FROM ledger

-- name: select_links
SELECT number, at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac,
    first_letter, last_letter, digest
FROM ledger WHERE number > :after ORDER BY number LIMIT :count_max

-- name: select_letter
SELECT l.id, l.queue, l.origin, l.state, l.message_id, l.type, l.exchange, l.routing_key, l.grp, l.redrive_id,
    l.redriven_count, l.revision, l.acked, l.captured_at, l.changed_at, l.body_bytes, l.digest, c.headers, c.shown,
    l.came_from, l.source_queue, l.reason, l.death_count, l.first_died_at, l.died_at, l.error_type, l.error_message,
    c.error_stack
FROM letters l JOIN contents c ON c.letter = l.id

-- name: select_queue_hours
SELECT queue, hour, arrived, redriven, came_back FROM queue_hours WHERE hour > :after ORDER BY queue

-- name: select_recoveries
SELECT id, line FROM recoveries WHERE id < :before ORDER BY id DESC LIMIT :count_max

-- name: select_redrive
SELECT id, name, reason, plan, state, wish, total, operation, started_at, started_by, why, holder, held_until,
    changed_at, changed_by, watched_until
FROM redrives

-- name: select_redrive_letters
SELECT r.letter, r.status, r.why, r.repeated, r.address, l.state, (
    SELECT max(id) FROM letters WHERE came_from = r.letter AND came_from > 0 AND l.state = 'came_back')
FROM redrive_letters r LEFT JOIN letters l ON l.id = r.letter

-- name: select_redrive_returns
SELECT r.letter, r.status, r.why, r.repeated, r.address, l.state, (
    SELECT max(id) FROM letters WHERE came_from = r.letter AND came_from > 0)
FROM letters l CROSS JOIN redrive_letters r
WHERE l.state = 'came_back' AND l.id > :after AND r.letter = l.id AND r.redrive = :redrive
    AND r.status NOT IN ('failed', 'skipped')
ORDER BY l.id LIMIT :count_max

-- name: select_redrive_tallies
SELECT redrive, status, count FROM redrive_tallies WHERE redrive IN_IDS

-- name: select_resolved_due
SELECT id, queue, state FROM letters WHERE state = 'redriven' AND changed_at < :before
ORDER BY changed_at LIMIT :count_max

-- name: select_revision_number
SELECT revision, state, queue FROM letters WHERE id = :letter

-- name: select_revisions
SELECT number, at, actor, note, body, headers, dropped FROM revisions WHERE letter = :letter ORDER BY number

-- name: select_revised
SELECT letter, count(*), max(number) FROM revisions WHERE letter > :after AND letter <= :last GROUP BY letter

-- name: select_sealed
SELECT l.id, l.queue, l.origin, l.message_id, l.type, l.exchange, l.routing_key, l.source_queue, l.reason,
    l.death_count, l.first_died_at, l.died_at, l.error_type, l.error_message, c.error_stack, l.grp, l.redrive_id,
    l.captured_at, l.body_bytes, l.digest, l.came_from, c.properties, c.blob, c.headers, c.shown, c.body,
    l.state, l.revision, l.seal
FROM letters l LEFT JOIN contents c ON c.letter = l.id WHERE l.id > :after AND l.id <= :last ORDER BY l.id

-- name: select_seals
SELECT 'letter', seal FROM letters WHERE id IN_IDS
UNION ALL SELECT 'revision', seal FROM revisions WHERE letter IN_IDS

-- name: select_sizes
SELECT id, body_bytes FROM letters WHERE id > :after ORDER BY id LIMIT :count_max

-- name: select_states_between
SELECT id, queue, state FROM letters WHERE id > :after AND id <= :last

-- name: select_states
SELECT id, queue, state FROM letters WHERE id IN_IDS ORDER BY id

-- name: select_tallies
SELECT queue, state, count FROM tallies WHERE count <> 0 ORDER BY queue, state

-- name: select_to_lease
SELECT r.letter, r.redrive_id, r.address, r.status, l.state, l.body_bytes, l.queue, l.origin, l.revision
FROM (
    SELECT * FROM (
        SELECT letter, redrive_id, address, status FROM redrive_letters
        WHERE redrive = :redrive AND status = 'waiting' ORDER BY letter LIMIT :count_max) fresh
    UNION ALL
    SELECT * FROM (
        SELECT letter, redrive_id, address, status FROM redrive_letters
        WHERE redrive = :redrive AND status IN ('leased', 'unknown') AND lease_until <= :now
        ORDER BY letter LIMIT :count_max) again
) r LEFT JOIN letters l ON l.id = r.letter
ORDER BY r.letter LIMIT :count_max

-- name: select_to_release
SELECT r.letter, l.queue, l.state, r.status, r.redrive
FROM redrives t JOIN redrive_letters r ON r.redrive = t.id LEFT JOIN letters l ON l.id = r.letter
WHERE t.state = 'cancelled' AND r.status IN ('leased', 'unknown') AND r.lease_until <= :now
ORDER BY r.redrive, r.letter LIMIT :count_max

-- name: select_to_settle
SELECT r.letter, l.queue, l.state, r.status, r.lease_until
FROM redrive_letters r LEFT JOIN letters l ON l.id = r.letter
WHERE r.redrive = :redrive AND r.letter IN_IDS ORDER BY r.letter

-- name: select_tokens
SELECT document, revoked_at FROM tokens ORDER BY name

-- name: set_counter
INSERT INTO counters (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: set_lease
UPDATE redrive_letters
SET repeated = CASE
        WHEN status = 'waiting' AND NOT EXISTS (
            SELECT 1 FROM redrive_letters other
            WHERE other.letter = redrive_letters.letter AND other.status = 'released')
        THEN repeated ELSE 1 END,
    status = 'leased', lease_until = :until
WHERE redrive = :redrive AND letter IN_IDS

-- name: set_redrive_hold
UPDATE redrives SET holder = :holder, held_until = :until WHERE id = :redrive

-- name: set_redrive_state
UPDATE redrives SET state = :state, why = :why, changed_at = :now, changed_by = :actor, watched_until = 0
WHERE id = :redrive

-- name: set_redrive_status
UPDATE redrive_letters SET status = :status, why = :why, lease_until = 0 WHERE redrive = :redrive AND letter IN_IDS

-- name: set_redriven
UPDATE letters SET state = 'redriven', changed_at = :now, redriven_count = redriven_count + 1 WHERE id IN_IDS

-- name: set_redrive_watch
UPDATE redrives SET watched_until = :until WHERE id = :redrive AND state = 'running'

-- name: set_revision
UPDATE letters SET revision = :number, changed_at = :now WHERE id = :letter

-- name: set_state
UPDATE letters SET state = :state, changed_at = :now WHERE id IN_IDS

-- name: shrink_group
UPDATE failure_groups SET count = count - :count WHERE key = :key

-- name: sum_ledger
-- By no index: to read the rows one after the other is quicker than to look each up.
SELECT queue || '', from_state, to_state, CAST(sum(count) AS bigint) FROM ledger WHERE to_state <> ''
GROUP BY queue || '', from_state, to_state

