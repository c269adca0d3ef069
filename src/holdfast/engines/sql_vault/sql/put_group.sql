INSERT INTO failure_groups (key, title, count, first_at, last_at, sample, status, note)
VALUES (:key, :title, :count, :now, :now, :sample, 'open', '')
ON CONFLICT (key) DO UPDATE SET count = failure_groups.count + excluded.count, last_at = excluded.last_at,
    sample = excluded.sample,
    status = CASE WHEN failure_groups.status = 'resolved' THEN 'regressed' ELSE failure_groups.status END
