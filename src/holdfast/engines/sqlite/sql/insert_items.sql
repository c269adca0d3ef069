INSERT INTO items (id, kind, encoding, reference, payload) VALUES
