UPDATE redrives SET holder = :holder, held_until = :until WHERE id = :redrive
