SELECT id, queue, state FROM letters WHERE id IN_IDS ORDER BY id
