UPDATE letters SET redriven_count = redriven_count + 1 WHERE id IN_IDS
