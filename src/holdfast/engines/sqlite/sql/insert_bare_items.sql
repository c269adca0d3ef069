-- The payloads are an array that is bound as one value; nothing goes back to Python from its first row to its last.
INSERT INTO items (id, kind, encoding, reference, payload)
SELECT ?1 + a.rowid - 1, '', '', '', a.value FROM carray(?2) a
