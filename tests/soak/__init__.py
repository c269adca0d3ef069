"""The long crash runs: `make soak`."""
