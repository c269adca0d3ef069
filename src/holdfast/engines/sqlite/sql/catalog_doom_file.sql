INSERT INTO files (generation, doomed) VALUES (?, 1) ON CONFLICT DO UPDATE SET doomed = 1
