UPDATE letters SET acked = :acked WHERE id IN_IDS
