INSERT INTO revisions (letter, number, headers, dropped, at, actor, note, body)
VALUES (:letter, :number, :headers, :dropped, :now, :actor, :note, :body)
