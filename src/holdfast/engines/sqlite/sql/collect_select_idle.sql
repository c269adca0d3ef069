SELECT id FROM transactions WHERE is_clean = 0 AND progress_at <= ?1
AND state IN ('forwarding', 'awaiting', 'sending') ORDER BY id LIMIT ?2
