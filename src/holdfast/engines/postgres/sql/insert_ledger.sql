-- $1 queue, $2 its name, $3 moment or null, $4 action, $5 item ids, $6 reasons, $7 count of each, $8 detail.
INSERT INTO holdfast.ledger (at, queue, queue_name, action, item_id, reason, count, detail)
SELECT holdfast.moment_us($3::bigint), $1::bigint, $2::text, $4::text, given.item_id, given.reason, $7::bigint, $8::text
FROM unnest($5::text[], $6::text[]) AS given (item_id, reason)
