"""Measurements, side by side with the peers: `make bench`. Ratios within one run, never seconds alone."""
