DELETE FROM starts WHERE number IN (SELECT value FROM json_each(?))
