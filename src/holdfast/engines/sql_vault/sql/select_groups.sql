SELECT sample, key, title, count, first_at, last_at, status, note FROM failure_groups
WHERE sample < :before AND (:status = '' OR status = :status) ORDER BY sample DESC LIMIT :count_max
