"""Recovery: every letter out of a dead-letter queue, none lost, whatever fails."""
