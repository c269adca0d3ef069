UPDATE letters SET state = :state, changed_at = :now WHERE id IN_IDS
