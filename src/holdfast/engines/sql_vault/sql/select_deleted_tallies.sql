SELECT queue, state, count FROM tallies WHERE state = 'deleted' AND count <> 0
