SELECT generation, doomed FROM files
