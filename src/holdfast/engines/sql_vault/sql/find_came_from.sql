SELECT r.letter, l.queue, l.state, l.redriven_count FROM redrive_letters r JOIN letters l ON l.id = r.letter
WHERE r.redrive_id = :redrive_id
