SELECT state, holder, held_until FROM redrives WHERE id = :redrive
