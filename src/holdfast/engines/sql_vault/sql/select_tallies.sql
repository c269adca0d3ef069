SELECT queue, state, count FROM tallies WHERE count <> 0 ORDER BY queue, state
