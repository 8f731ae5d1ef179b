"""One process beside several ranks."""
