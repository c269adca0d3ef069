SELECT queue, state, count(*) FROM letters GROUP BY queue, state ORDER BY queue, state
