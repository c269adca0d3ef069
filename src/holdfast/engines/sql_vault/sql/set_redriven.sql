UPDATE letters SET state = 'redriven', changed_at = :now, redriven_count = redriven_count + 1 WHERE id IN_IDS
