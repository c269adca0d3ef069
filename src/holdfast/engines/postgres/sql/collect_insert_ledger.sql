INSERT INTO holdfast.collect_ledger (at, transaction_id, action, reason, detail)
VALUES (holdfast.collect_now_us(), $1::text, $2::text, $3::text, $4::text)
