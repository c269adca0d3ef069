SELECT number, body, headers, dropped, at, actor, note FROM revisions WHERE letter = :letter ORDER BY number
