SELECT count(*) FROM letters l CROSS JOIN redrive_letters r
WHERE l.state = 'came_back' AND r.letter = l.id AND r.redrive = :redrive
