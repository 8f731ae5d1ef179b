"""Where the tokens of a transformer are, found by running it."""
