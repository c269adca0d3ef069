SELECT id FROM holdfast.collect_transactions
WHERE NOT is_clean AND progress_at <= holdfast.collect_now_us() - $1::bigint AND state IN ('forwarding', 'awaiting', 'sending')
ORDER BY id LIMIT $2::bigint
