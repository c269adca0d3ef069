SELECT revision, state, queue FROM letters WHERE id = :letter
