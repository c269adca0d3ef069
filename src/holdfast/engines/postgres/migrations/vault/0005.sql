-- Which letters one came back as.
CREATE INDEX letters_by_came_from ON letters (came_from) WHERE came_from > 0;
